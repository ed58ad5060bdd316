"""One vLLM engine in its own thread: requests, samples, recorded log-probabilities, and vLLM's internals by version."""
