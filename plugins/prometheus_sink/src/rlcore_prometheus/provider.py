"""The entry point: describes the sink without importing prometheus_client."""

from rlcore.spi import Provider
from rlcore_prometheus.config import PrometheusConfig

PROVIDER = Provider(name="prometheus", spi=(2, 0), config=PrometheusConfig, backend="rlcore_prometheus.sink:PrometheusSink")
"""The provider for the entry point."""
