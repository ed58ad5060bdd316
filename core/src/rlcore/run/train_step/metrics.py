"""Computes the metrics of a step: of its samples, of each data set, of its updates."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, evolve, field

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.protocols import CollectedRollouts, LoopObserver, TrainedStep
from rlcore.spi import RolloutBatch, TrainStepResult
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore.spi.execution import TrainerGroup


def step_metrics(result: TrainStepResult) -> dict[str, float]:
    """Return all metrics of an update by their names in metrics.jsonl."""
    own = {"loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": result.learning_rate}
    return {**own, **result.metrics}


def training_metrics(results: Sequence[TrainStepResult]) -> dict[str, float]:
    """Return the mean of each metric over the updates of a step that report it, and the greatest of `*_max`."""
    values: dict[str, list[float]] = {}
    for result in results:
        for name, value in step_metrics(result).items():
            values.setdefault(name, []).append(value)
    return {name: max(found) if name.endswith("_max") else float(np.mean(found)) for name, found in values.items()}


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
        "truncated_fraction": float(np.maximum.reduceat(collected.truncated, first).mean()),
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


@define(kw_only=True, eq=False)
class PerDatasetMetrics(LoopObserver):
    """Gathers the log-probabilities that a step's updates have begun with, and measures those of each data set."""

    algorithm: AlgorithmHandle
    sets_of: Callable[[int], Sequence[str]]
    """[G]: the data set of each group of a step."""
    _updates: list[tuple[Int64Array, Float32Array]] = field(init=False, factory=list)
    """The step's updates: sequences, int64 [M], and float32 [T] of these, 0.0 in the others."""

    @staticmethod
    def are_measurable(algorithm: AlgorithmHandle, trainer: TrainerGroup) -> bool:
        """Return whether they need no more than the log-probabilities that an update can return."""
        needs = algorithm.needs
        can_return = trainer.has(spi.capabilities.STEP_LOGPROBS) and needs.head == "tokens"
        return algorithm.measures and can_return and not needs.reference_logprobs

    def add(self, sequences: Int64Array, logprobs: Float32Array) -> None:
        """An update on some of the batch's sequences, int64 [M]: float32 [T] of these, 0.0 in the others."""
        self._updates.append((sequences, logprobs))

    def on_step_trained(self, step: TrainedStep) -> Mapping[str, float]:
        """`data/<set>/samples`, and `data/<set>/<name>` of each figure."""
        samples, sets = step.scored, self.sets_of(step.step)
        logprobs, updated = np.zeros(samples.batch.num_tokens, np.float32), set[int]()
        for sequences, found in self._updates:
            logprobs = logprobs + found
            updated.update(samples.group_ids[sequences].tolist())
        self._updates.clear()
        figures: dict[str, float] = {}
        for name in sorted({*sets}):
            groups = [group for group, of in enumerate(sets) if of == name and group in updated]
            sequences = np.flatnonzero(np.isin(samples.group_ids, groups))
            figures[f"data/{name}/samples"] = float(len(sequences))
            if len(sequences):
                offsets = samples.batch.offsets
                of_set = np.concatenate([logprobs[offsets[one] : offsets[one + 1]] for one in sequences])
                measured = self.algorithm.measure(_part(samples, sequences), of_set, None)
                figures |= {f"data/{name}/{figure}": value for figure, value in measured.items()}
        return figures


def _part(samples: spi.RolloutBatch, sequences: Int64Array) -> spi.RolloutBatch:
    batch = samples.batch.select(sequences)
    _, groups = np.unique(batch.sequence_columns[spi.GROUP_IDS], return_inverse=True)
    return evolve(
        samples,
        batch=evolve(batch, sequence_columns={**batch.sequence_columns, spi.GROUP_IDS: groups.astype(np.int32)}),
        rewards=samples.rewards[sequences],
        valid=samples.valid[sequences],
        finish_reasons=samples.finish_reasons[sequences],
        truncated=samples.truncated[sequences],
    )
