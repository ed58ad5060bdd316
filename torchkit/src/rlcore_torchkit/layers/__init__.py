"""Layers of models that trainers compute: attention over packed sequences, norms, rotary positions, routers with given
experts."""
