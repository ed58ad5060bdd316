"""The ways that weights travel, one file each, found by the channel's name."""

from importlib import import_module
from typing import Any

import torch

from rlcore_vllm.channels.channel import Receiver, Sender
from rlcore_vllm.setup.config import VllmConfig


def make_sender(channel: str, config: VllmConfig, device: torch.device) -> Sender:
    """The sending side; `device` holds the tensors that will be sent."""
    sender: Sender = import_module(f"{__name__}.{channel}").Sender(config, device)
    return sender


def make_receiver(channel: str, device: torch.device, rank: int, options: dict[str, Any]) -> Receiver:
    """The receiving side in one rank of an engine, with what the sender's `connect` gave for it."""
    receiver: Receiver = import_module(f"{__name__}.{channel}").Receiver(device, rank, options)
    return receiver
