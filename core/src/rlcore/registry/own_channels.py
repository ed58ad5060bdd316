"""The channel that every installation has."""

from rlcore.spi.channels import ChannelProvider

IN_PROCESS = ChannelProvider(name="in_process", spi=(2, 0), cost=30, devices={"cpu", "cuda"}, reach="process")
"""The trainer's tensors themselves; with RefitRequest.may_alias without a copy."""
