"""Trainer for rlcore: Megatron-Core with tensor, pipeline, context, expert, sequence and data parallelism"""

import sys
import warnings
from types import ModuleType

from rlcore.gpu import has_gpu

# What Megatron-Core says of itself: on import, one by one, the optional kernels that are not installed (what they are worth is
# in the documentation); later, that it reads gradients of views on purpose, and calls functions that newer torch has renamed.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core|rlcore_megatron\.setup\.cpu_shim")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core")
warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor`"
)

if not has_gpu():
    # On a CPU its fused functions run as they are. Its own decorator would import torch's compiler, which takes seconds.
    fuser = ModuleType("megatron.core.jit")
    vars(fuser)["jit_fuser"] = lambda function: function
    sys.modules.setdefault(fuser.__name__, fuser)
