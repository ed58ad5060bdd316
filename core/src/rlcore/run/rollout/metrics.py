"""Computes the metrics of an evaluation's answers."""

from collections.abc import Sequence

import numpy as np

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.rollout.pass_at_k import pass_metrics
from rlcore.run.train_step.sample_metrics import rollout_metrics


def evaluation_metrics(collected: CollectedRollouts, ks: Sequence[int] = (), *, with_bounds: bool = False) -> dict[str, float]:
    """pass@1, and pass@k for each of `ks`, with the bounds of each where they are asked for. They count a sample whose
    environment failed as not solved: a share of all samples is the one that evaluations of several models can be
    compared by."""
    metrics = rollout_metrics(collected)
    names = ("reward_mean", "response_length_mean", "truncated_fraction")
    first = collected.first_sequences
    set_of = np.asarray(collected.data_sets, object)[collected.group_ids[first]] if collected.data_sets else None
    solved = collected.success[first]
    return {
        "evaluation/pass@1": float(solved.mean()),
        **pass_metrics(solved, collected.group_ids[first], [1, *ks] if with_bounds else ks, with_bounds=with_bounds),
        **{f"evaluation/{name}": metrics[name] for name in names},
        "evaluation/failed": metrics["environment/failed"],
        **{f"evaluation/pass@1/{name}": float(solved[set_of == name].mean()) for name in sorted({*collected.data_sets})},
    }
