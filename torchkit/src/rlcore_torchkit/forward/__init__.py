"""Forward passes of packed microbatches by transformers' own classes, with images and with context parallelism."""
