"""What an update trains on, and whether trainer and generator agree on it."""
