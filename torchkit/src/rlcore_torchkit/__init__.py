"""The torch code that backends share; imported by plugins alone, module by module: this file imports no torch.

`attention` packed attention, `logprobs` log-probabilities without a full logits tensor, `digest` checksums of tensors,
`buckets` weights cut for travel, `models` checking and loading of Hugging Face models, `hf_directory` writing them,
`safetensors_files` reading parts of them, `requirements` what has to be installed, `model_check` what is wrong with a model,
`device_memory` how much devices have, `rank_grid` how ranks are numbered, `agreement` what succeeds on all ranks or on none,
`rl` the mathematics of policy gradients.
"""
