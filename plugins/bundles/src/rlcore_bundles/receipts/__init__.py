"""Receipts: sequences of random steps, computed again on another path while the run goes on."""
