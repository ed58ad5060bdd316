"""Trainer for rlcore: Hugging Face models under PyTorch FSDP2"""
