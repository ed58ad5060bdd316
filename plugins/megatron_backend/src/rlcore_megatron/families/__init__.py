"""Families that Megatron computes beside those that are described for all trainers, a file each; none imports torch."""
