"""Training steps in files: written while a run goes on, and computed again on any backend."""
