"""Algorithm for rlcore: distillation from a teacher"""
