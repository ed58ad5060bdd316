"""An OpenAI-compatible server in front of a generator, which records the tokens that each session read and sampled."""
