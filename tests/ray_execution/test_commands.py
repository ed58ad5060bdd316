"""The software of the nodes is the driver's."""

from pathlib import Path

import pytest

from rlcore.spi import PluginError
from rlcore_ray import pool
from rlcore_ray.commands import Software


def test_another_version_of_the_core_is_named_with_its_nodes() -> None:
    from rlcore_ray.failures import WorkerInfo

    here = Software.here()
    other = Software(versions=(*((name, "0.0" if name == "rlcore" else version) for name, version in here.versions),))
    places = [WorkerInfo(rank=rank, node=f"10.0.0.{rank}", log_file=Path("log")) for rank in range(3)]
    pool._require_same(places, [here] * 3)
    with pytest.raises(PluginError, match=r"node\(s\) 10.0.0.1, 10.0.0.2: rlcore 0.0"):
        pool._require_same(places, [here, other, other])
