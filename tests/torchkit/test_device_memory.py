"""The memory of the devices that a process sees."""

from pathlib import Path

import pytest

from rlcore_torchkit.device_memory import compute_capabilities, device_memories


def test_devices_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    capabilities = "echo '0, GPU-aaa, 8.0'; echo '1, GPU-bbb, 12.1'"
    memories = "echo '0, GPU-aaa, 81559'; echo '1, GPU-bbb, 143771'"
    tool.write_text(f'#!/bin/sh\nif test "$1" = --query-gpu=index,uuid,compute_cap\nthen {capabilities}\nelse {memories}\nfi\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_memories() == [81559 * 2**20, 143771 * 2**20]
    assert compute_capabilities() == [(8, 0), (12, 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device_memories() == [143771 * 2**20, 81559 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert device_memories() == [143771 * 2**20]
    assert compute_capabilities() == [(12, 1)]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert device_memories() is None
    assert compute_capabilities() is None
