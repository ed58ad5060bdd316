"""The policy as Megatron computes it: its configuration, layers, routers and heads."""
