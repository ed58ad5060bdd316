"""The data that an adapter is given, and the object that it returns.

Shapes: N sequences, each from its first loss token on and padded on the right to R tokens. Floating tensors are float32 in one
run of the adapter and float64 in another, which tells how much of a difference is rounding.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

Metrics: TypeAlias = Mapping[str, float]


class PeerError(Exception):
    """An adapter cannot do what it was asked for; the text says what was found, what was expected, and what to do."""


# Dataclasses, as the environment of another framework need not have attrs.
@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a step: N valid ones, those of a group adjacent."""

    rewards: Tensor
    """floating [N]: with the recipe's length penalty."""
    group_ids: Tensor
    """int64 [N], non-decreasing."""
    truncated: Tensor
    """bool [N]: whether a limit cut the sample off."""
    mask: Tensor
    """bool [N, R]: loss tokens."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The sequences of one optimizer step."""

    mask: Tensor
    """bool [N, R]: loss tokens."""
    logprobs: Tensor
    """floating [N, R]: the policy's, before the update; 0.0 outside of the mask, as in the other columns."""
    previous: Tensor
    """floating [N, R]: the trainer's at the start of the step."""
    generation: Tensor
    """floating [N, R]: the generator's."""
    reference: Tensor
    """floating [N, R]: the reference policy's; the policy's own where the recipe has no reference."""
    advantages: Tensor
    """floating [N, R]: rlcore's."""
    entropies: Tensor
    """floating [N, R]: the policy's; zeros, since losses are linear in them and no bundle has them."""
    truncated: Tensor
    """bool [N]"""
    num_updates: int
    """Optimizer steps of the whole step."""
    num_step_tokens: int
    """Loss tokens of all its updates."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a comparison."""

    options: Mapping[str, Any]
    """The options of the recipe's algorithm by name, as docs/config.md lists them for `[algorithm.grpo]`."""
    samples_per_prompt: int
    max_response_tokens: int
    masks_truncated: bool
    """rollout.on_truncation = "mask"."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """The framework's own options that the command sets, as text."""
    checkout: Path | None = None
    """The folder of the framework's sources, where the command names one."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A framework with its settings, ready to be called."""

    version: str
    """Name and version, such as "TRL 1.16.0"."""
    functions: Sequence[str]
    """The functions that it calls, for the reader."""
    settings: Mapping[str, Any]
    """The framework's options that have another value than its default, or that the recipe maps."""
    unmapped: Sequence[str]
    """Sentences: options of the recipe without a counterpart."""
    advantages: Callable[[Samples], Tensor] | None
    """Returns floating [N, R], or [N] for one a sample; None where the framework has no such estimator. May raise PeerError."""
    loss: Callable[[Update], tuple[Tensor, Metrics]] | None
    """Returns the scalar that the framework minimises, differentiable with respect to the update's columns, and its metrics;
    None where the framework has no such loss. May raise PeerError."""
    metric_names: Mapping[str, str] = field(default_factory=dict)
    """rlcore's metric of each of the framework's that has a counterpart."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The reasons why `advantages` or `loss` is None."""


class Adapter:
    """A framework with its settings, and the options of the recipe that it lacks: what adapters have in common."""

    name: str
    """The framework's name in texts."""
    settings: Mapping[str, Any]

    def __init__(self, setup: Setup, version: str) -> None:
        self.setup, self.version = setup, version
        self.unmapped: list[str] = []
        self.reasons: dict[str, str] = {}

    def lacks(self, option: str, why: str) -> None:
        """Note an option of the recipe whose value has no counterpart."""
        self.unmapped.append(f"{option} = {shown(self.setup.options[option])}: {why}")

    def lacks_loss(self) -> None:
        """Note that the framework has no loss for the recipe's objective and ratio."""
        objective, ratio = (shown(self.setup.options[name]) for name in ("objective", "ratio"))
        self.reasons["loss"] = f"{self.name} has no loss for objective = {objective} with ratio = {ratio}"

    def require(self, function: Callable[..., Any], names: Iterable[str]) -> None:
        """Raise PeerError where a function of the framework has not these parameters."""
        require_parameters(self.version, function, names)

    def take(self, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Set the framework's options, as the recipe maps them or the command sets them. See `overridden`."""
        self.settings = overridden(settings, self.setup.overrides, known)

    def peer(self: Any, functions: Sequence[str], metric_names: Mapping[str, str]) -> Peer:
        """The framework, ready to be called by the methods `advantages` and `loss`."""
        own = ("version", "settings", "unmapped", "reasons", "advantages", "loss")
        return Peer(functions=functions, metric_names=metric_names, **{name: getattr(self, name) for name in own})


def shown(value: object) -> str:
    """An option's value, as recipes write it."""
    if isinstance(value, str):
        return f'"{value}"'
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def require_parameters(version: str, function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise PeerError where a function has not these parameters."""
    found = [*inspect.signature(function).parameters]
    if missing := [name for name in names if name not in found]:
        raise PeerError(
            f"{version}: found {function.__qualname__}({', '.join(found)}); expected the parameters {', '.join(missing)} too. "
            "Take a version that has them, or an adapter for this one"
        )


def overridden(settings: Mapping[str, Any], overrides: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those that the command gives, each of the type of its default in `known`. PeerError for others."""
    found = dict(settings)
    for name, text in overrides.items():
        if name not in known:
            raise PeerError(
                f"--set {name}: found an option that the framework does not have; it has {', '.join(sorted(known))}"
            )
        found[name] = _value(name, text, found.get(name, known[name]))
    return found


def _value(name: str, text: str, like: Any) -> Any:
    if text == "none":
        return None
    if isinstance(like, bool) or text in ("true", "false"):
        if text not in ("true", "false"):
            raise PeerError(f"--set {name}: found {text!r}; expected true or false")
        return text == "true"
    if isinstance(like, str):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
