"""The pluggy markers of the project, and the records of the lifecycle hooks, which trainers and generators share."""

from pathlib import Path
from typing import Literal, TypeAlias

import pluggy
from attrs import frozen

PROJECT = "rlcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a backend's hooks, and with `wrapper=True` an observer's."""


Place: TypeAlias = Literal["device", "host"]


@frozen(kw_only=True)
class SetResidencyRequest:
    """Move a backend's memory."""

    weights: Place
    """Model weights (for a trainer also the reference policy's)."""
    state: Place
    """The place of other large memory: a trainer's optimizer state and gradients, a generator's KV cache (discarded on
    "host")."""
    discard_weights: bool = False
    """With weights="host", a generator need keep no copy: it holds no weights that count until the next refit. Needs the
    capability `discard_weights`."""


RESIDENT = SetResidencyRequest(weights="device", state="device")


@frozen(kw_only=True)
class SetResidencyResult:
    """The memory that is left in each place, measured."""

    device_bytes: int
    """Bytes this backend still holds on the device; on CPU, where both places are one, all of its bytes."""
    reserved_bytes: int | None = None
    """Bytes that the allocator of the backend's process keeps from others on the device, for tensors of any use and unused
    between them, a generator's own pools apart. Contexts and communication libraries take more beside it. None where there is
    no such allocator, as on CPU."""


@frozen(kw_only=True)
class SaveStateRequest:
    """Write the backend's state below a directory that exists and is empty but for other ranks' files."""

    directory: Path
    kind: Literal["resume", "hf", "peft"]
    """"resume": all that load_state needs, in safetensors and JSON or in a format of the backend's own, in subdirectories too.
    "hf": a Hugging Face model directory (`save_hf`). "peft": the adapters of a trainer built with TrainerContext.lora, as the
    directory that PEFT reads (`lora`)."""


@frozen(kw_only=True)
class SaveStateResult:
    """The files that this rank wrote."""

    files: tuple[str, ...]
    """Paths relative to the directory."""


@frozen(kw_only=True)
class LoadStateRequest:
    """Restore what save_state(kind="resume") wrote, whatever the layout it was written in and wherever memory lives now."""

    directory: Path
    optimizer: bool = True
    """False where a trainer loads the weights and their version alone, and its optimizer begins anew. Needs `split_step`."""


@frozen(kw_only=True)
class LoadStateResult:
    """The state that the backend holds."""

    weight_version: int


@frozen(kw_only=True)
class CloseRequest:
    """Free everything. The last call that a backend receives; like every hook it takes one request, so that fields can come."""
