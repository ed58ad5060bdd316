"""Small models with random weights, and ranks in processes of this machine, for tests and first runs."""
