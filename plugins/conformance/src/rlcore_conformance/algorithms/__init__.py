"""Checks of algorithms: their batches and their losses."""
