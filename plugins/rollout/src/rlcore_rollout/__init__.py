"""Rewarded samples of prompts: episodes of generator and environment."""
