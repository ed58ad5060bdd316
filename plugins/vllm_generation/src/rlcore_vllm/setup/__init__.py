"""The recipe's section, vLLM's requirements, and the settings that one engine starts with."""
