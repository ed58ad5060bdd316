"""Trial of every family of decoders that both transformers and vLLM have, as tiny random models."""
