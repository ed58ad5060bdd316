"""Trial of every family of decoders that both transformers and SGLang have, as tiny random models."""
