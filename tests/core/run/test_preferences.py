"""Runs on preferences: whole pairs in every microbatch, the reference computed once, the same after a resumption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, DataError, LogprobsRequest, TrainStepRequest, hookimpl
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.trainer import FakeTrainer
from rlcore_doctor.preview import preview

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
ROWS = [
    {"prompt": f"{'abc'[n % 3]}{'de'[n % 2]}:", "chosen": "a" * (n % 4 + 1), "rejected": "b" * (n % 3 + 1)} for n in range(12)
]


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = ("data.train.source=jsonl", f"data.train.path={path}")
    rest = ("training.max_tokens_per_microbatch=20", "evaluation.at_end=false", "evaluation.every_n_steps=0", "run.num_steps=8")
    return ("algorithm.fake.source=preferences", "algorithm.fake.kl_coefficient=1.0", *data, *rest)


class Recorded(FakeTrainer):
    """Keeps what it was asked."""

    steps: ClassVar[list[TrainStepRequest]] = []
    logprobs: ClassVar[list[LogprobsRequest]] = []

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> Any:
        self.steps.append(request)
        return super().train_step(request)

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> Any:
        self.logprobs.append(request)
        return super().get_logprobs(request)


@pytest.fixture
def recorded(registry_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Recorded, "steps", [])
    monkeypatch.setattr(Recorded, "logprobs", [])
    return registry_with(trainer=Recorded)


def test_there_is_no_replay_of_pairs(run: Run, options: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        run(*options, replay_schedule=tmp_path / "schedule.jsonl")
    assert [problem.path for problem in raised.value.problems] == ["--replay-schedule"]


def test_pairs_are_learned_and_stay_together(run: Run, options: tuple[str, ...], recorded: Any, tmp_path: Path) -> None:
    run(*options, registry=recorded)
    assert max(len(request.microbatches) for request in Recorded.steps) > 1
    for request in Recorded.steps:
        for batch in request.microbatches:
            assert batch.num_sequences % 2 == 0
            tokens = [batch.tokens[batch.offsets[n] : batch.offsets[n + 1]] for n in range(batch.num_sequences)]
            masks = [batch.loss_mask[batch.offsets[n] : batch.offsets[n + 1]] for n in range(batch.num_sequences)]
            said = [FakeTokenizer().decode(one[mask])[0] for one, mask in zip(tokens, masks, strict=True)]
            assert said == ["a", "b"] * (batch.num_sequences // 2)
        assert request.counts.num_loss_sequences == sum(batch.num_sequences for batch in request.microbatches)
    margins = [record["margin"] for record in read_metrics(tmp_path / "runs" / "run")[1:]]
    assert margins[-1] > margins[0] + 0.1


def test_the_reference_is_asked_once_for_each_sequence(run: Run, options: tuple[str, ...], recorded: Any) -> None:
    pytest.importorskip("rlcore_reference")
    run(*options, registry=recorded)
    found = [
        tuple(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]].tolist())
        for request in Recorded.logprobs
        if request.model == "reference"
        for batch in request.microbatches
        for n in range(batch.num_sequences)
    ]
    assert len(found) == len(set(found))
    texts = {(row["prompt"], row[side]) for row in ROWS for side in ("chosen", "rejected")}
    assert len(found) == len(texts)


def test_a_resumed_run_computes_nothing_again_and_is_the_same(
    run: Run, options: tuple[str, ...], recorded: Any, tmp_path: Path
) -> None:
    pytest.importorskip("rlcore_reference")
    run(*options, "run.name=whole", registry=recorded)
    run(*options, "run.name=part", "run.num_steps=4", registry=recorded)
    Recorded.logprobs.clear()
    run(*options, "run.name=part", resume=True, registry=recorded)
    assert [request for request in Recorded.logprobs if request.model == "reference"] == []
    assert read_metrics(tmp_path / "runs" / "part") == read_metrics(tmp_path / "runs" / "whole")


def test_without_a_reference_nothing_is_kept(run: Run, options: tuple[str, ...], tmp_path: Path) -> None:
    run(*options, "algorithm.fake.kl_coefficient=0.0")
    assert not (tmp_path / "runs" / "run" / "reference_logprobs.sqlite").exists()


def test_updates_of_a_step_divide_its_pairs(run: Run, options: tuple[str, ...], recorded: Any) -> None:
    run(*options, "training.minibatches_per_step=3", "run.num_steps=1", registry=recorded)
    assert sum(request.counts.num_loss_sequences for request in Recorded.steps) == 16
    assert [request.counts.num_loss_sequences % 2 for request in Recorded.steps] == [0, 0, 0]


def test_check_says_what_will_be_kept_and_shows_the_prompt(prepared: Callable[..., RunPlan], options: tuple[str, ...]) -> None:
    pytest.importorskip("rlcore_reference")
    found = preview(prepared(*options), FakeTokenizer())
    num_tokens = sum(len(row["prompt"]) * 2 + len(row["chosen"]) + len(row["rejected"]) + 2 for row in ROWS)
    assert f"take up to {4 * num_tokens:,} bytes" in found.rows["train"]
    assert found.first_prompt == "ad:"


def test_the_trainer_is_told_of_the_largest_pair(prepared: Callable[..., RunPlan], options: tuple[str, ...]) -> None:
    plan = prepared(*options)
    assert plan.max_microbatch_tokens == 2 * (16 + 8)
    assert prepared(*options, "training.max_tokens_per_microbatch=64").max_microbatch_tokens == 64
    assert prepared("training.max_tokens_per_microbatch=20").max_microbatch_tokens == 20


def test_bad_rows_end_the_run_before_anything_is_built(run: Run, options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b"}\n{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    with pytest.raises(DataError, match=r"2 of 2 rows[^$]*line 1[^$]*line 2") as raised:
        run(*options)
    assert np.char.count(str(raised.value), "\n") == 2
    assert not (tmp_path / "runs" / "run").exists()
