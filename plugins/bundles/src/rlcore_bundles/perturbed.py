"""Weights changed by one rounding: how far rounding alone moves a step's quantities is measured with them."""

import shutil
from pathlib import Path

from attrs import evolve

from rlcore.spi import ConfigError, Problem
from rlcore_bundles.replaying import Start

UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The distance from 1 to the next number of each dtype."""


def coarser(first: str, second: str) -> str:
    """The dtype of the two that rounds more."""
    return max(first, second, key=UNITS.__getitem__)


def measurable(start: Start) -> Start:
    """The start from which rounding is measured: without a trainer's state that is in another format than safetensors, such as
    Megatron's. The weights of such a state would replace the changed ones."""
    if start.state is None or any(start.state.rglob("*.safetensors")):
        return start
    return evolve(start, state=None)


def perturbed_start(start: Start, folder: Path, dtype: str, seed: int) -> Start:
    """A start whose weights differ by one unit of `dtype` each, up or down as the seed says; it is written to `folder`.
    ConfigError where the weights are no local directory."""
    source = start.adapters or Path(start.model)
    if not source.is_dir():
        found, expected = f"{start.model}, which is no local directory", "a local one, of which rounding can be measured"
        raise ConfigError([Problem(path="model", found=found, expected=expected, remedy="Name one with --weights.")])
    target = _copy(source, folder / "model", dtype, seed)
    state = None if start.state is None else _copy(start.state, folder / "state", dtype, seed)
    if start.adapters is not None:
        return evolve(start, adapters=target, state=state)
    return evolve(start, model=str(target), state=state)


def _copy(source: Path, target: Path, dtype: str, seed: int) -> Path:
    """A copy of a folder, whose numbers in safetensors are changed. Those of a coarser dtype become `dtype`."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in sorted(source.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            metadata, tensors = opened.metadata(), {}
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point():
                    signs = torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1
                    wide = torch.promote_types(tensor.dtype, getattr(torch, dtype))
                    tensor = (tensor.double() * (1 + UNITS[dtype] * signs)).to(wide)
                tensors[name] = tensor
        save_file(tensors, target / file.relative_to(source), metadata)
    return target
