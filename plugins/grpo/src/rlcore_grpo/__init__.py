"""Algorithm for rlcore: GRPO and its variants"""
