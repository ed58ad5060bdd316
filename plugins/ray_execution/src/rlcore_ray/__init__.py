"""Execution on Ray: worker processes, one per rank, on this machine or a cluster."""
