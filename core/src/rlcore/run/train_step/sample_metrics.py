"""Computes the metrics of a step's samples."""

import numpy as np

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import RolloutBatch


def sample_metrics(samples: RolloutBatch) -> dict[str, float]:
    """Return the metrics of a policy's samples; none of rows of a data set."""
    return rollout_metrics(samples) if isinstance(samples, CollectedRollouts) else {}


def rollout_metrics(collected: CollectedRollouts) -> dict[str, float]:
    """Return the samples' metrics. Rewards and success are those of valid samples, 0.0 where there is none; lengths and ends
    are those of all, since the policy said what it said, whatever the environment did with it."""
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
    """Return metrics of each data set's valid samples, where there are several, and its number of samples."""
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
    """Return tokens per second of the whole step: with prompts, and those generated."""
    metrics = {"tokens_per_second": samples.batch.num_tokens / total_s}
    if isinstance(samples, CollectedRollouts):
        metrics["generated_tokens_per_second"] = float(samples.num_generated.sum()) / total_s
    return metrics
