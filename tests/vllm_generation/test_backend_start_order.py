"""Which engines start at the same time."""

import threading
from operator import methodcaller
from types import SimpleNamespace

import pytest

from rlcore_vllm.backend import _start


@pytest.mark.parametrize(
    ("devices", "waves"),
    [
        ([(), ()], [{0, 1}]),
        ([(0,), (1,)], [{0, 1}]),
        ([(0,), (0,)], [{0}, {1}]),
        ([(0, 1), (2, 3), (1, 2), (0, 3)], [{0, 1}, {2, 3}]),
    ],
)
def test_engines_of_one_device_start_one_after_another(devices, waves):
    found = []
    barriers = [threading.Barrier(len(wave)) for wave in waves]

    def start(number):
        wave = next(index for index, members in enumerate(waves) if number in members)
        barriers[wave].wait(timeout=300)  # passes only once all of its wave are there
        found.append(wave)

    replicas = [
        SimpleNamespace(devices=places, start=lambda number=number: start(number)) for number, places in enumerate(devices)
    ]
    _start(replicas, methodcaller("start"))
    assert found == sorted(found)
    assert len(found) == len(devices)
