"""Generator `sglang`: an SGLang engine in a process of its own."""
