"""Metric names of other libraries, for figures with an equal meaning there."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from attrs import frozen

NamesAs: TypeAlias = Literal["trl", "verl", "wandb"]
"""TRL's logs and MLflow's runs of it; verl's trackers; TRL's runs in W&B, TensorBoard, Trackio and SwanLab."""

_TRL = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward_mean": "reward",
    "response_length_mean": "completions/mean_length",
    "response_length_max": "completions/max_length",
    "truncated_fraction": "completions/clipped_ratio",
    "entropy": "entropy",
}
"""Names in the logs of GRPOTrainer (trl 1.16.0) and of the Trainer of transformers."""
NAMES: Mapping[NamesAs, Mapping[str, str]] = {
    "trl": _TRL,
    "wandb": {own: f"train/{name}" for own, name in _TRL.items()},  # transformers.integrations.rewrite_logs
    "verl": {
        "grad_norm": "actor/grad_norm",
        "reward_mean": "critic/score/mean",
        "critic/loss": "critic/vf_loss",
        "critic/grad_norm": "critic/grad_norm",
        "critic/clip_fraction": "critic/vf_clipfrac",
        "critic/value_mean": "critic/values/mean",
        "critic/return_mean": "critic/returns/mean",
    },
}
"""The other library's name of each metric of metrics.jsonl, where both have the same meaning; of verl 0.9.1."""
OWN = "rlcore/"
"""Before the names of all other figures: the other library may mean something else by them."""


@frozen(kw_only=True)
class MetricNamesConfig:
    """The option of sinks that names figures as another library does."""

    names_as: NamesAs | None = None
    """Names of a step's figures: those of TRL's logs, of verl's trackers, or of TRL's runs in W&B, where the meaning is equal;
    all others begin with "rlcore/". None keeps the names of metrics.jsonl."""


def renamed(metrics: Mapping[str, float], names_as: NamesAs | None) -> dict[str, float]:
    """The figures of a step by the names of another library, or by their own for None."""
    if names_as is None:
        return dict(metrics)
    names = NAMES[names_as]
    return {names.get(name, OWN + name): value for name, value in metrics.items()}
