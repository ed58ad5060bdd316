"""The settings of each tensor of a Hugging Face checkpoint by `[optimizer]`: its method, its rates, its moments' storage."""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Literal

from attrs import evolve, frozen

from rlcore.spi.context import CheckContext, OptimizerGroup, OptimizerSpec, TrainerContext
from rlcore.spi.errors import Problem
from rlcore.spi.trainer import OptimStepRequest

BLOCK = 256
"""Elements of a row that share the scale of a moment in 8 bits."""
LEAST_8BIT = 4096
"""Elements of the smallest tensor whose moments are kept in 8 bits."""
DECODED_ELEMENTS = 2**22
"""Most elements, unless one row has more, whose moments in 8 bits are float32 at a time."""
DECODED_BYTES = 80
"""Bytes of such an element: moments in float32, and indices that encode them."""
_NOT_IN_LAYERS = ("embed", "lm_head", "shared_head.head")
"""Parts of the names of tensors that no linear layer of a decoder's layer has, although they may lie below one."""
_FLAT_STACK = re.compile(r"\.experts\.(?!\d+\.).*(?<!\.weight)(?<!bias)\Z")
"""Names of parameters of all experts, of which no module has one to itself."""
_TORCHAOS = "optim/quant_utils.py"
"""The file of torchao that has the codes of moments."""


@frozen(kw_only=True)
class StepOverrides:
    """Settings that one step puts in the place of the optimizer table's; None leaves them. A group's own stay."""

    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None

    @classmethod
    def of(cls, request: OptimStepRequest) -> "StepOverrides":
        """The overrides of a request."""
        return cls(betas=request.betas, eps=request.eps, weight_decay=request.weight_decay)


NO_OVERRIDES = StepOverrides()


@frozen(kw_only=True)
class StepSettings:
    """The settings of one step."""

    learning_rate: float
    """The table's at this step, or the one that the step names."""
    share: float
    """The share of every tensor's peak learning rate."""
    max_grad_norm: float
    overrides: StepOverrides


def step_settings(context: TrainerContext, schedule_step: int, given: OptimStepRequest | None = None) -> StepSettings:
    """The settings of the step at this place of the schedule, and what `given` names in their place."""
    spec, share = context.optimizer, context.schedule.share(schedule_step, context.num_train_steps)
    rate, limit, overrides = context.learning_rate(schedule_step), spec.max_grad_norm, NO_OVERRIDES
    if given is not None:
        overrides = StepOverrides.of(given)
        limit = limit if given.max_grad_norm is None else given.max_grad_norm
        if given.learning_rate is not None:
            rate, share = given.learning_rate, given.learning_rate / spec.learning_rate
    return StepSettings(learning_rate=rate, share=share, max_grad_norm=limit, overrides=overrides)


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
    follows_betas: bool
    """True where `betas` are the table's."""
    follows_decay: bool
    """True where `weight_decay` is the table's."""

    def overridden(self, overrides: StepOverrides) -> "TensorSettings":
        """The settings for a step with these overrides."""
        return evolve(
            self,
            betas=overrides.betas if self.follows_betas and overrides.betas is not None else self.betas,
            weight_decay=(
                overrides.weight_decay if self.follows_decay and overrides.weight_decay is not None else self.weight_decay
            ),
        )


def tensor_settings(spec: OptimizerSpec, name: str, shape: tuple[int, ...], *, in_layers: bool) -> TensorSettings:
    """The settings of a tensor by its name and shape in exports; `in_layers` where it belongs to one of the decoder's layers.

    A tower of vision, and a head of values, are none of these layers.
    """
    group = group_of(spec, name) or OptimizerGroup(parameters=(name,))
    is_muon = spec.name == "muon" and group.name is None and in_layers and is_matrix(name, shape)
    weight_decay = spec.weight_decay if group.weight_decay is None else group.weight_decay
    return TensorSettings(
        method="muon" if is_muon else "adamw",
        learning_rate=group.learning_rate or spec.learning_rate,
        betas=group.betas or spec.betas,
        weight_decay=weight_decay if _decays(name, shape) else 0.0,
        eight_bit=spec.moments == "8bit" and not is_muon and len(shape) > 1 and prod(shape) >= LEAST_8BIT,
        follows_betas=group.betas is None,
        follows_decay=group.weight_decay is None and _decays(name, shape),
    )


def group_of(spec: OptimizerSpec, name: str) -> OptimizerGroup | None:
    """Return the first group with a pattern that matches the name of a tensor; None where the table's settings count."""
    return next((group for group in spec.groups if any(fnmatchcase(name, pattern) for pattern in group.parameters)), None)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of a decoder's layer is a weight matrix, or a stack [E, ., .] of the matrices of E experts.

    A convolution's kernel is none: its module's name says "conv", or its shape [C, 1, K] that each channel has its own.
    """
    if any(part in name for part in _NOT_IN_LAYERS) or name.endswith("bias"):
        return False
    is_weight = name.endswith(".weight") or ".experts." in name
    is_kernel = "conv" in name.removesuffix(".weight").rpartition(".")[2]
    return is_weight and not is_kernel and len(shape) in (2, 3) and min(shape[-2:]) > 1


def is_flat_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor [E · A, B] has the matrices of E experts as rows of one, as DBRX's files have them."""
    return len(shape) == 2 and _FLAT_STACK.search(name) is not None


def _decays(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and not name.endswith("bias")


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


def effect_problems(
    spec: OptimizerSpec, tensors: Mapping[str, tuple[tuple[int, ...], bool]], section: str = "optimizer"
) -> Iterator[Problem]:
    """Yield a problem for each key of a group that changes nothing of the tensors that the group has.

    `tensors` are the shape of each by name, and whether it belongs to one of the decoder's layers.
    """
    owners = {name: group_of(spec, name) for name in tensors}
    for number, group in enumerate(spec.groups):
        own = {name: each for name, each in tensors.items() if owners[name] is group}
        methods = {tensor_settings(spec, name, shape, in_layers=layered).method for name, (shape, layered) in own.items()}
        without = evolve(spec, groups=())
        muon = any(tensor_settings(without, name, each[0], in_layers=each[1]).method == "muon" for name, each in own.items())
        keys = {
            "betas": (group.betas is not None and methods == {"muon"}, "Muon trains all of its tensors"),
            "weight_decay": (
                group.weight_decay is not None and not any(_decays(name, shape) for name, (shape, _) in own.items()),
                "biases, norms and other vectors are never decayed",
            ),
            "name": (group.name is not None and spec.name == "muon" and not muon, "AdamW trains all of its tensors anyway"),
        }
        for key, (is_idle, why) in keys.items():
            if own and is_idle:
                found = f"a value without effect: {why}"
                yield Problem(path=f"{section}.groups[{number}].{key}", found=found, expected="no such key")


def optimizer_section(context: CheckContext) -> str:
    """Return the table of the recipe that `context.optimizer` is: a critic's own, or [optimizer]."""
    return "critic" if context.critic is not None and context.head == "value" else "optimizer"


def missing_torchao(spec: OptimizerSpec, install: str, section: str = "optimizer") -> Iterator[Problem]:
    """Refuse moments in 8 bits where torchao, whose codes they are, is not installed; `install` names the extra that has it."""
    if spec.moments != "8bit":
        return
    installed = find_spec("torchao")
    folders = () if installed is None else installed.submodule_search_locations or ()
    if not any((Path(folder) / _TORCHAOS).is_file() for folder in folders):
        remedy = f"pip install '{install}'"
        found = '"8bit" without torchao' if installed is None else f'"8bit" with a torchao that has no {_TORCHAOS}'
        yield Problem(path=f"{section}.moments", found=found, expected="torchao installed", remedy=remedy)
