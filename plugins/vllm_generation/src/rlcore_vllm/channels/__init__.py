"""The ends of channels, as vLLM's engines use them: vLLM's own of two channels, and of all others those of the channel."""

from importlib import import_module
from typing import Any

import torch

from rlcore.spi import ChannelOptions, ChannelReceiver, ChannelSender, find_channel
from rlcore_vllm.setup.config import VllmConfig

_OWN = ("in_process", "shards")
"""Channels without ends of their own, each of which has a file here."""


def make_sender(channel: str, config: VllmConfig, device: torch.device) -> ChannelSender:
    """Build the sending side; `device` holds the tensors that will be sent."""
    options = ChannelOptions(directory=config.refit_directory, timeout_s=config.refit_timeout_s)
    if channel in _OWN:
        return import_module(f"{__name__}.{channel}").Sender(options, device)
    return find_channel(channel).make_sender(options, device)


def make_receiver(channel: str, device: torch.device, rank: int, options: dict[str, Any]) -> ChannelReceiver:
    """Build the receiving side in one rank of an engine, with what the sender's `connect` gave for it."""
    if channel in _OWN:
        return import_module(f"{__name__}.{channel}").Receiver(device, rank, options)
    return find_channel(channel).make_receiver(device, rank, options)
