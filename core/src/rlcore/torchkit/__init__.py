"""The torch code that backends share; imported by plugins alone, module by module: this file imports no torch.

`attention` packed attention, `logprobs` log-probabilities without a full logits tensor, `digest` checksums of tensors,
`buckets` weights cut for travel, `models` checking and loading of Hugging Face models, `hf_directory` writing them,
`requirements` what has to be installed.
"""
