"""Code that vLLM runs in each rank of an engine: it receives and loads the weights of a refit."""
