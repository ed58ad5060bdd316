"""Reward models: trained on preferences, and as the environment that rewards rollouts."""
