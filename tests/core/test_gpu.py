"""GPUs and the default device are found from driver files and the environment."""

from pathlib import Path

import pytest

from rlcore import gpu
from rlcore.gpu import compute_capabilities, detect_device, device_memories, free_memories


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A root below which a driver shows one GPU, and a torch that can use it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu.metadata, "version", lambda _: "2.12.0")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    return tmp_path


def test_a_gpu_shown_by_the_driver_is_taken(driver):
    assert detect_device(driver) == "cuda"


def test_without_driver_files_it_is_cpu(tmp_path, driver):
    (driver / "dev" / "nvidia0").rename(driver / "dev" / "nvidiactl")
    assert detect_device(tmp_path) == "cpu"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", "cpu"), ("-1", "cpu"), ("-1,0", "cpu"), ("0", "cuda"), ("1,2", "cuda"), ("GPU-5f1e", "cuda"), ("0,-1", "cuda")],
)
def test_visible_devices_decide(driver, monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect_device(driver) == expected


def test_a_torch_built_without_cuda_runs_on_the_cpu(driver, monkeypatch):
    monkeypatch.setattr(gpu.metadata, "version", lambda _: "2.12.0+cpu")
    assert detect_device(driver) == "cpu"


def test_without_torch_the_driver_decides(driver, monkeypatch):
    def absent(name):
        raise gpu.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu.metadata, "version", absent)
    assert detect_device(driver) == "cuda"


def test_devices_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    capabilities = "echo '0, GPU-aaa, 8.0'; echo '1, GPU-bbb, 12.1'"
    memories = "echo '0, GPU-aaa, 81559'; echo '1, GPU-bbb, 143771'"
    free = "echo '0, GPU-aaa, 81000'; echo '1, GPU-bbb, 4'"
    cases = {"compute_cap": capabilities, "memory.total": memories, "memory.free": free}
    branches = "\n".join(f'if test "$1" = --query-gpu=index,uuid,{name}\nthen {lines}\nfi' for name, lines in cases.items())
    tool.write_text(f"#!/bin/sh\n{branches}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_memories() == [81559 * 2**20, 143771 * 2**20]
    assert free_memories() == [81000 * 2**20, 4 * 2**20]
    assert compute_capabilities() == [(8, 0), (12, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device_memories() == [143771 * 2**20, 81559 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert device_memories() == [143771 * 2**20]
    assert compute_capabilities() == [(12, 1)]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert device_memories() is free_memories() is None
    assert compute_capabilities() is None
