"""Generator for rlcore: batched generation with Hugging Face transformers"""
