"""Sink for rlcore: Weights & Biases"""
