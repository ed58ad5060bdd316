"""Runs whose samples are of older weights, or of several, against the same independent GRPO.

Each token's log-probability is held against the weights of the version that it names, which the reference keeps. Where the
versions of a sample's tokens are exchanged the log-probabilities are others, so that a span that began a token early would be
found.
"""

from pathlib import Path

import numpy as np
import pytest

from rlcore_torchkit.testing.models import make_model

from .cases import ALPHABET, MAX_LENGTH, Case, named
from .conftest import Run
from .judging import LOGPROBS, judge
from .recorded import RecordedRun
from .reference_run import ExpectedStep


def case(**options: object) -> Case:
    """One step behind. The pull to the reference sees to it that no step is without an update."""
    return Case(
        **{"trainer": "fsdp2", "updates": 1, "previous": "trainer", "kl": True, "cut": False, "staleness": 1, **options}
    )


STOPPED = [
    case(),
    case(previous="generation"),
    case(on_stale="rescore", updates=4),
    case(on_stale="rescore", previous="generation"),
    case(trainer="megatron", updates=4),
    case(cut=True, masked=True),
    case(reuse=2),
    case(reuse=2, previous="generation", updates=2, epochs=2),
    case(trainer="megatron", reuse=2, updates=2),
]
"""Generation stops for each update and goes on behind it, in one process."""


@pytest.mark.wide(keep=[STOPPED[place].name for place in (0, 2, 3, 4, 6, 7)])
@named(STOPPED)
def test_samples_that_go_on_behind_an_update(case: Case, run: Run, model: Path) -> None:
    assert_right(case, run(case, model), model)


@named([case(on_stale="rescore", cut=True, masked=True)])
def test_rescored_samples_of_what_older_weights_had_kept(case: Case, run: Run, model: Path) -> None:
    recorded = run(case, model)
    judge(case, recorded, model)
    assert sum(line.get("async/tokens_rescored", 0) for line in recorded.metrics) > 0


@pytest.mark.usefixtures("local_ray")
@named([case(separate=True)])
def test_a_generator_that_is_stopped_beside_the_trainer(case: Case, run: Run, model: Path) -> None:
    assert_right(case, run(case, model), model)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on CPU takes heads of at least 32."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_model(folder, "qwen3", seed=7, alphabet=ALPHABET, max_length=MAX_LENGTH, hidden_size=64, num_heads=2)


@pytest.mark.usefixtures("local_ray")
@named([case(generator="vllm", separate=True)])
def test_weights_that_come_in_flight(case: Case, run: Run, wide_model: Path) -> None:
    assert_right(case, run(case, wide_model), wide_model)


@pytest.mark.wide(keep=[case(generator="vllm", cut=True, masked=True).name])
@named([case(generator="vllm"), case(generator="vllm", cut=True, masked=True)])
def test_an_engine_that_is_stopped(case: Case, run: Run, wide_model: Path) -> None:
    assert_right(case, run(case, wide_model), wide_model)


def assert_right(case: Case, recorded: RecordedRun, model: Path) -> None:
    """And that the run, if it is right, exercises what it is to prove."""
    steps = judge(case, recorded, model)
    assert not steps[0].is_stale
    if case.masked or not case.cut:
        assert recorded.metrics[0]["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    first = [step.updates[0].figures for step in steps if step.is_stale]
    if case.on_stale == "rescore":
        assert sum(line.get("async/tokens_rescored", 0) for line in recorded.metrics) > 0
    elif case.reuse == 1:  # else no sample goes on behind an update
        assert_spans_are_told_apart(steps)
    if case.reuse > 1:
        assert [one.key for one in recorded.samples[0]] == [one.key for one in recorded.samples[1]]
        assert not {one.key for one in recorded.samples[1]} & {one.key for one in recorded.samples[2]}
    if case.previous == "generation":
        assert max(figures["ratio_max"] for figures in first) > 1.3
    else:
        assert any(0 < figures["importance_truncated"] < 1 for figures in first)


def assert_spans_are_told_apart(steps: list[ExpectedStep]) -> None:
    """Under the other version's weights, samples that two versions said would not have been what was recorded."""
    distances = [
        float(np.abs(own.sample.generation_logprobs - own.mirrored.numpy())[own.sample.loss_mask].max())
        for step in steps
        for own in step.samples
        if own.mirrored is not None
    ]
    assert len(distances) > 3
    assert np.mean(np.array(distances) > LOGPROBS) > 0.9
    assert max(distances) > 10 * LOGPROBS  # few samples cross a refit on a busy machine
