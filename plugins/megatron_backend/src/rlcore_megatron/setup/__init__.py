"""The recipe's section, Megatron's requirements and the fields passed through to its classes."""
