"""From hidden states to log-probabilities, entropies and values: one vocabulary, in chunks, in kernels or over ranks."""
