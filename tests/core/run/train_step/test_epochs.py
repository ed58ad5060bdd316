"""Epochs over a step's samples, with the fakes: their log-probabilities are computed once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlcore.registry.discovery import Registry
from rlcore.spi import LogprobsRequest, LogprobsResult, hookimpl
from rlcore.testing.fakes.trainer import FakeTrainer

from ..conftest import read_metrics  # type: ignore[import-not-found]


class Counting(FakeTrainer):
    """Counts the sequences whose log-probabilities are computed, by model."""

    sequences: ClassVar[dict[str, int]]

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        number = sum(batch.num_sequences for batch in request.microbatches)
        self.sequences[request.model] = self.sequences.get(request.model, 0) + number
        return super().get_logprobs(request)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_log_probabilities_are_computed_once_for_all_epochs(
    run: Callable[..., Any], registry_with: Callable[..., Registry], tmp_path: Path, minibatches: int
) -> None:
    asked, metrics = [], []
    for epochs in (1, 3):
        Counting.sequences = {}
        run(
            *("run.num_steps=2", "algorithm.fake.kl_coefficient=0.1", "algorithm.fake.previous_logprobs=true"),
            *(f"run.name=epochs{epochs}", f"training.epochs_per_step={epochs}", f"training.minibatches_per_step={minibatches}"),
            registry=registry_with(trainer=Counting),
        )
        asked.append(Counting.sequences)
        metrics.append(read_metrics(tmp_path / "runs" / f"epochs{epochs}"))
    once, thrice = asked
    assert thrice["policy"] == thrice["reference"] == once["reference"] > 0
    assert once.get("policy", 0) < once["reference"]
    assert metrics[0] != metrics[1]
