"""The settings of each tensor of a Hugging Face checkpoint by `[optimizer]`: its method, its rates, its moments' storage."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from math import prod
from typing import Literal

from attrs import frozen

from rlcore.spi.context import CheckContext, OptimizerGroup, OptimizerSpec
from rlcore.spi.errors import Problem

BLOCK = 256
"""Elements of a row that share the scale of a moment in 8 bits."""
LEAST_8BIT = 4096
"""Elements of the smallest tensor whose moments are kept in 8 bits."""
_NOT_IN_LAYERS = ("embed", "lm_head", "shared_head.head", "conv")
"""Parts of the names of tensors that no linear layer of a decoder's layer has, although they may lie below one."""


@frozen(kw_only=True)
class TensorSettings:
    """The settings of one tensor. Learning rates are peaks, for the schedule to scale."""

    method: Literal["adamw", "muon"]
    learning_rate: float
    betas: tuple[float, float]
    """AdamW's alone."""
    weight_decay: float
    """0.0 for biases and vectors."""
    eight_bit: bool
    """True where AdamW's moments of it are kept in 8 bits."""


def tensor_settings(spec: OptimizerSpec, name: str, shape: tuple[int, ...], *, in_layers: bool) -> TensorSettings:
    """The settings of a tensor by its name and shape in exports; `in_layers` where it belongs to one of the decoder's layers.

    A tower of vision, and a head of values, are none of these layers.
    """
    group = group_of(spec, name) or OptimizerGroup(parameters=(name,))
    is_muon = spec.name == "muon" and group.name is None and in_layers and is_matrix(name, shape)
    decays = len(shape) > 1 and not name.endswith("bias")
    weight_decay = spec.weight_decay if group.weight_decay is None else group.weight_decay
    return TensorSettings(
        method="muon" if is_muon else "adamw",
        learning_rate=group.learning_rate or spec.learning_rate,
        betas=group.betas or spec.betas,
        weight_decay=weight_decay if decays else 0.0,
        eight_bit=spec.moments == "8bit" and not is_muon and len(shape) > 1 and prod(shape) >= LEAST_8BIT,
    )


def group_of(spec: OptimizerSpec, name: str) -> OptimizerGroup | None:
    """Return the first group with a pattern that matches the name of a tensor; None where the table's settings count."""
    return next((group for group in spec.groups if any(fnmatchcase(name, pattern) for pattern in group.parameters)), None)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of a decoder's layer is a weight matrix, or a stack [E, ., .] of the matrices of E experts."""
    if any(part in name for part in _NOT_IN_LAYERS) or name.endswith("bias"):
        return False
    if len(shape) == 3:
        return ".experts." in name
    return len(shape) == 2 and min(shape) > 1 and (name.endswith(".weight") or ".experts." in name)


def group_problems(spec: OptimizerSpec, names: Iterable[str], section: str = "optimizer") -> Iterator[Problem]:
    """Yield a problem for each pattern that matches none of the tensors' names, and for each group whose tensors all belong
    to groups before it."""
    known = list(names)
    taken = [group_of(spec, name) for name in known]
    for number, group in enumerate(spec.groups):
        path = f"{section}.groups[{number}].parameters"
        unmatched = [pattern for pattern in group.parameters if not any(fnmatchcase(name, pattern) for name in known)]
        if unmatched:
            found = f"{', '.join(map(repr, unmatched))}, which match none of the {len(known)} tensors that train"
            expected = f"shell patterns over names such as {', '.join(known[:1] + known[-1:])}"
            yield Problem(path=path, found=found, expected=expected, remedy="Tied tensors have one name.")
        elif not any(group is other for other in taken):
            expected = "a tensor that no group before it has"
            yield Problem(path=path, found="patterns that match tensors of earlier groups alone", expected=expected)


def optimizer_section(context: CheckContext) -> str:
    """Return the table of the recipe that `context.optimizer` is: a critic's own, or [optimizer]."""
    return "critic" if context.critic is not None and context.head == "value" else "optimizer"


def missing_torchao(spec: OptimizerSpec, install: str, section: str = "optimizer") -> Iterator[Problem]:
    """Refuse moments in 8 bits where torchao, whose codes they are, is not installed; `install` names the extra that has it."""
    if spec.moments == "8bit" and find_spec("torchao") is None:
        remedy = f"pip install '{install}'"
        yield Problem(path=f"{section}.moments", found='"8bit" without torchao', expected="torchao installed", remedy=remedy)
