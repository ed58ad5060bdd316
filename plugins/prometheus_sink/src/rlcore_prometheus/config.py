"""The section `[sinks.prometheus]`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import Text, between


@frozen(kw_only=True)
class PrometheusConfig:
    """`[sinks.prometheus]`: the run's metrics at http://HOST:PORT/metrics while it goes on."""

    host: Text = "127.0.0.1"
    """The address to listen on. Anyone who reaches it reads the metrics: there is no password. "0.0.0.0" is every address."""
    port: Annotated[int, between(0, 65535)] = 9400
    """The port; a taken one is an error. 0 takes a free one, which prometheus.json in the run directory names."""
