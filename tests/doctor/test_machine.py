"""The description of the machine on doctor's page."""

import subprocess
import types

import pytest

from rlcore_doctor import machine

ROWS = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1, 9.0\nNVIDIA H100 80GB HBM3, 81559 MiB, 570.1, 9.0\n"


@pytest.mark.parametrize(("error", "has_gpu", "expected"), [(None, True, 2), (OSError, False, 0), (OSError, True, 1)])
def test_gpus(monkeypatch, error: type[Exception] | None, has_gpu: bool, expected: int) -> None:
    def run(*_, **__):
        if error is not None:
            raise error
        return types.SimpleNamespace(stdout=ROWS)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(machine, "has_gpu", lambda: has_gpu)
    found = machine.gpus()
    assert len(found) == expected
    assert all(gpu["name"] for gpu in found)


def test_variables_that_change_a_run_are_listed_and_no_others(monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    monkeypatch.setenv("LS_COLORS", "x")
    found = machine.machine()
    assert found["variables"]["RLCORE_DEBUG"] == "1"
    assert "LS_COLORS" not in found["variables"]
    assert found["system"]["memory_gib"] > 0
