"""The memory of the devices that a process sees."""

from pathlib import Path

import pytest

from rlcore_torchkit.device_memory import device_memories


def test_devices_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aaa, 81559'\necho '1, GPU-bbb, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_memories() == [81559 * 2**20, 143771 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device_memories() == [143771 * 2**20, 81559 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert device_memories() == [143771 * 2**20]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert device_memories() is None
