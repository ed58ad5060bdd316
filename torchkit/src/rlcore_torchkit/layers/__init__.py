"""Layers of models that trainers compute: attention over packed sequences, norms, routers with given experts."""
