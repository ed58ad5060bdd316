"""Trainer for rlcore: Megatron-Core with tensor, pipeline, context, expert, sequence and data parallelism"""

import warnings

# What Megatron-Core says of itself: on import, one by one, the optional kernels that are not installed (what they are worth is
# in the documentation); later, that it reads gradients of views on purpose, and calls functions that newer torch has renamed.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core|rlcore_megatron\.cpu_shim")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core")
warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor`"
)
