"""The profile of one process: what is imported when, and the order of calls for Nsight Systems."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore_profiler.config import ProfileConfig
from rlcore_profiler.process_profile import ProcessProfile

MODULES = ("provider", "profile", "driver_profile", "rank_status")


def test_plugins_are_listed_without_torch() -> None:
    names = ", ".join(f"rlcore_profiler.{module}" for module in MODULES)
    subprocess.run([sys.executable, "-c", f"import sys, {names}; sys.exit('torch' in sys.modules)"], check=True)


def test_nsight_gets_one_range_of_steps_with_hooks_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU: what is called of CUDA is written down."""
    called: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            called.append(f"push {self.name}")

        def __exit__(self, *_: Any) -> None:
            called.append("pop")

    api = SimpleNamespace(cudaProfilerStart=lambda: called.append("start"), cudaProfilerStop=lambda: called.append("stop"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: api)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    profile = ProcessProfile(tmp_path, "rank-0", ProfileConfig(steps=(2, 3), profiler="nsight"))
    for step in (1, 2, 2, 3, 4, 4):
        profile.turn_to(step)
        with profile.range(f"step {step}"):
            pass
    profile.close()
    ranges = [f"push step {step}" for step in (2, 2, 3)]
    assert called == ["start", *(one for name in ranges for one in (name, "pop")), "synchronize", "stop"]
    assert list(tmp_path.iterdir()) == []
