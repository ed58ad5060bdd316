"""The core's own execution: trainer and generator in the driver's process."""

from rlcore.spi.cluster import ClusterConfig
from rlcore.spi.provider import Provider

IN_PROCESS = Provider(
    name="in_process",
    spi=(2, 0),
    config=ClusterConfig,
    backend="rlcore.run.execution.in_process:in_process",
    priority=50,
)
