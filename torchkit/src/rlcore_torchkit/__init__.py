"""The torch code that backends share, in rooms, each importing those below it; this file imports no torch.

`trainer` parts of a trainer, `adapters` low-rank adapters, `huggingface` models and their directories, `forward` passes of
packed microbatches, `head` log-probabilities and values, `layers` attention and norms, `architectures` families of models,
`refit` weights on their way to generators, `rl` the formulas of policy gradients, `distributed` ranks and devices;
`generation` is what generators share, `requirements` what has to be installed, `transformers_import` imports transformers, and
`testing` makes small models and ranks. `attention`, `buckets`, `digest`, `logprobs`,
`losses`, `microbatch`, `models` and `trainer_hooks` are the paths by which plugins of others import from these rooms.
"""
