"""The algorithm `ppo`: a policy and a critic (arXiv:1707.06347)."""
