"""The certificate of a run: which proofs its directory holds."""
