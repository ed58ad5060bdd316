"""Text of runs: tokenizers of Hugging Face models, chat messages and tools, and rows of data sets as tokens."""
