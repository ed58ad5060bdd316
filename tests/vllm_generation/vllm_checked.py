"""Sections of recipes, checked for a small model with devices that need not be here."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import CheckContext, Delta, ModelSpec, Problem
from rlcore_torchkit.distributed.format_bytes import GIB
from rlcore_vllm.checks import check as check_module
from rlcore_vllm.checks import share_check
from rlcore_vllm.checks.check import check
from rlcore_vllm.setup.config import VllmConfig

Problems = Callable[..., list[Problem]]


def section_problems(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    *,
    device: str = "cpu",
    length: int = 64,
    config: dict[str, Any] | None = None,
    memories: Any = (80 * GIB,),
    world_size: int = 1,
    shared: tuple[int, ...] | None = None,
    channel: str | None = None,
    delta: Delta = "off",
    planned: Collection[str] = (),
    **options: Any,
) -> list[Problem]:
    """The problems and notes of a section; on "cuda" with so many devices of so many bytes."""
    for module in (check_module, share_check):
        monkeypatch.setattr(module, "device_memories", lambda: None if memories is None else list(memories))
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    directory = model
    if config is not None:
        directory = model.parent / "other"
        directory.mkdir(exist_ok=True)
        for file in model.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        changed = json.loads((model / "config.json").read_text()) | config
        (directory / "config.json").write_text(json.dumps(changed))
    context = CheckContext(
        channel=channel,
        delta=delta,
        model=ModelSpec(path=str(directory), dtype="float32" if device == "cpu" else "bfloat16"),
        device=device,  # type: ignore[arg-type]
        world_size=world_size,
        max_sequence_length=length,
        generator_devices=shared,
        planned_options=frozenset(planned),
    )
    return list(check(context, VllmConfig(**({"gpu_memory_utilization": 0.5} | options))))
