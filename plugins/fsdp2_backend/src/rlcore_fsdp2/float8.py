"""Linear layers in float8, by torchao."""

from typing import Any

import torch
from torch import nn

from rlcore.spi import ConfigError, Problem
from rlcore_torchkit.huggingface.models import architecture_of

FIRST_CAPABILITY = (8, 9)
"""The lowest compute capability of CUDA devices that multiply float8."""


def use_float8(model: Any, device: torch.device) -> None:
    """Let the linear layers of the decoder's layers compute in float8, with scales from each tensor as it is.

    Names and parameters stay as they are; gradients too are multiplied in float8. On CPU its rounding is emulated. Routers and
    fused experts keep the compute dtype. Raises ConfigError where the device has no float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        found = f"true on {torch.cuda.get_device_name(device)}"
        problem = Problem(path="trainer.fsdp2.fp8", found=found, expected="a GPU with float8", remedy="Set it to false")
        raise ConfigError([problem])
    # Padding: the products of a weight's gradient run over tokens, of which there is any number.
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    layers = architecture_of(model.config).modules.layers_of(model)
    convert_to_float8_training(layers, module_filter_fn=_is_linear, config=config)


def _is_linear(module: nn.Module, name: str) -> bool:  # noqa: ARG001
    return isinstance(module, nn.Linear)
