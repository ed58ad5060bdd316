"""Algorithm for rlcore: supervised fine-tuning"""
