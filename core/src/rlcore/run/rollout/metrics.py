"""Computes the metrics of a step's samples."""

from collections.abc import Sequence

import numpy as np

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.rollout.pass_at_k import pass_metrics
from rlcore.spi import RolloutBatch


def rollout_metrics(collected: CollectedRollouts) -> dict[str, float]:
    """What the samples were like. Rewards and success are those of valid samples, 0.0 where there is none; lengths and ends are
    those of all, since the policy said what it said, whatever the environment did with it."""
    first = collected.first_sequences
    valid = collected.valid[first]
    rewards = collected.rewards[first][valid] if valid.any() else np.zeros(1, np.float32)
    success = collected.success[first][valid] if valid.any() else np.zeros(1, np.bool_)
    num_generated = np.add.reduceat(collected.num_generated, first)
    components = {name: column[first][valid] for name, column in collected.reward_components.items()}
    return {
        "reward_mean": float(rewards.mean(dtype=np.float64)),
        "reward_std": float(rewards.std(dtype=np.float64)),
        **{f"reward/{name}": float(part.mean(dtype=np.float64)) for name, part in components.items() if len(part)},
        "success_rate": float(success.mean()),
        "response_length_mean": float(num_generated.mean()),
        "response_length_max": float(num_generated.max()),
        "truncated_fraction": float(collected.truncated.mean()),
        "environment/failed": float(collected.failed[first].sum()),
        "environment/timed_out": float(collected.timed_out[first].sum()),
        **{f"environment/{name}": value for name, value in collected.environment_metrics.items()},
        **collected.schedule_metrics,
        **_of_sets(collected),
    }


def _of_sets(collected: CollectedRollouts) -> dict[str, float]:
    """What the valid samples of each data set were like, where there are several, and how many samples it had."""
    if not collected.data_sets:
        return {}
    first, names = collected.first_sequences, np.asarray(collected.data_sets, object)
    set_of, valid = names[collected.group_ids[first]], collected.valid[first]
    found: dict[str, float] = {}
    for name in sorted({*collected.data_sets}):
        counted = valid & (set_of == name)
        found[f"data/{name}/samples"] = float((set_of == name).sum())
        if counted.any():
            found[f"data/{name}/reward_mean"] = float(collected.rewards[first][counted].mean(dtype=np.float64))
            found[f"data/{name}/success_rate"] = float(collected.success[first][counted].mean())
    return found


def throughput_metrics(samples: RolloutBatch, total_s: float) -> dict[str, float]:
    """Tokens per second of the whole step, prompts included, and mean generated tokens of a sample."""
    metrics = {"tokens_per_second": samples.batch.num_tokens / total_s}
    if isinstance(samples, CollectedRollouts):
        metrics["generated_tokens_per_second"] = float(samples.num_generated.sum()) / total_s
        metrics["mean_generated_tokens"] = float(samples.num_generated.sum()) / len(samples.first_sequences)
    return metrics


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
