"""An environment for rlcore: episodes on NeMo Gym servers"""
