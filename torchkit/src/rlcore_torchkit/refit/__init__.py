"""Weights on their way from trainers to generators: buckets, digests, and transfers of shards."""
