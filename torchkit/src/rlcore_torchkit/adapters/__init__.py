"""Low-rank adapters: their arithmetic, the layers that have them, and PEFT directories."""
