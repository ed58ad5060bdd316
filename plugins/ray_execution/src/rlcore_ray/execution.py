"""The execution on Ray, as the core calls it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rlcore.execution import ExecutionContext
from rlcore.spi import OpenBackends
from rlcore_ray.config import RayConfig
from rlcore_ray.pool import open_pool
from rlcore_ray.session import ray_session


@contextmanager
def on_ray(context: ExecutionContext, config: RayConfig) -> Iterator[OpenBackends]:
    """Run Ray as long as the block, and open pools of workers in it."""
    with ray_session(config, context.arguments.device, context.arguments.log_directory):
        yield partial(open_pool, context, config)
