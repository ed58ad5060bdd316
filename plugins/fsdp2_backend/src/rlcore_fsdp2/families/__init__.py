"""Trial of every causal language model that the installed transformers can build, as a tiny random one."""
