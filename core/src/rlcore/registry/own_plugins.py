"""The core's own plugins: what every installation has of channels, data sources, environments and executions."""

from attrs import frozen

from rlcore.spi.channels import ChannelProvider
from rlcore.spi.cluster import ClusterConfig
from rlcore.spi.data_source import DataSourceProvider
from rlcore.spi.provider import Provider
from rlcore.spi.version import SPI_VERSION


@frozen(kw_only=True)
class PythonConfig:
    """`[environment.python]`: takes no options. The environment is an object of the program that calls rlcore.train."""


CHANNEL = ChannelProvider(name="in_process", spi=SPI_VERSION, cost=30, devices={"cpu", "cuda"}, reach="process")
"""The trainer's tensors themselves; with RefitRequest.may_alias without a copy."""
EXECUTION = Provider(
    name="in_process",
    spi=SPI_VERSION,
    config=ClusterConfig,
    backend="rlcore.run.execution.in_process:in_process",
    priority=50,
)
"""Trainer and generator in the driver's process."""
JSONL = DataSourceProvider(
    name="jsonl",
    spi=SPI_VERSION,
    priority=20,
    read="rlcore.run.data.jsonl_rows:read",
    suffixes={".jsonl", ".json", ".ndjson"},
)
"""JSONL files: one JSON object a line."""
PYTHON = Provider(name="python", spi=SPI_VERSION, config=PythonConfig, backend="rlcore.registry.binding:MissingEnvironment")
"""The environment that a program hands to a run."""
