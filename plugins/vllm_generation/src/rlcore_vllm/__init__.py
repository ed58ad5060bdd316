"""The generator `vllm`."""
