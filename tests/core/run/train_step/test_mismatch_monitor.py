"""Generators that misreport log-probabilities: the update that would learn from them is refused, and the samples are kept."""

import errno
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.report.progress import Progress
from rlcore.spi import (
    GENERATION_LOGPROBS,
    MISMATCH_METRICS,
    WEIGHT_VERSIONS,
    BoundError,
    RolloutBatch,
    TokenBatch,
    TrainingBatch,
    capabilities,
)
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer
from rlcore.testing.fakes.algorithm import FakeAlgorithm
from rlcore.testing.fakes.generator import FakeGenerator, RunningSamples

from ..conftest import read_metrics  # type: ignore[import-not-found]

MAX_SAMPLES = pytest.importorskip("rlcore_report.worst_samples", reason="keeps the worst samples").MAX_SAMPLES

Run = Callable[..., dict[str, Any]]
Lie = Callable[..., None]


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> Lie:
    """Of every third token, report `nats` too little, while the generator holds one of these weight versions."""
    honest = FakeGenerator.step

    def lying(nats: float, versions: Collection[int]) -> None:
        def step(self: FakeGenerator, samples: RunningSamples) -> Any:
            running, position = samples.left, samples.num_steps
            ended = honest(self, samples)
            if self.weight_version in versions and position % 3 == 0:
                samples.logprobs[running, position] -= nats
            return ended

        monkeypatch.setattr(FakeGenerator, "step", step)

    return lying


class Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        assert "\n" not in text
        self.texts.append(text)


def without(*missing: str) -> Registry:
    """The fakes, with a trainer that lacks some capabilities."""
    trainer = evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities - {*missing})
    return Registry.from_providers(
        {
            "trainer": [trainer],
            "generator": [FAKE_GENERATOR],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


def without_bounds() -> Registry:
    """With a trainer that cannot refuse."""
    return without(capabilities.METRIC_BOUNDS, capabilities.STEP_LOGPROBS)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_update_is_refused_and_the_run_goes_on_as_if_it_had_never_been_tried(run: Run, lie: Lie, tmp_path: Path) -> None:
    whole = tmp_path / "runs" / "whole"
    run("run.name=whole")
    lie(2.0, versions={4})  # two updates a step: those that sample step 3
    with pytest.raises(BoundError) as raised:
        run("run.name=lied", "checkpoint.every_n_steps=0")
    directory = tmp_path / "runs" / "lied"
    assert raised.value.metrics.keys() == {"token_mult_prob_error"}
    message = str(raised.value)
    assert message.startswith("step 3: generator and trainer disagree on the sampled tokens: token_mult_prob_error is 3.")
    for part in (
        "expected at most 2 (training.max_token_mult_prob_error)",
        str(directory / "logprob_mismatch" / "step-000003.parquet"),
        "step-000003.txt",
        "docs/train-inference-agreement.md",
        "The update was refused and changed nothing",
    ):
        assert part in message
    assert files(directory / "checkpoints") == ["step-000002"], "the state before the refused update"
    lie(0.0, versions=())
    run("run.name=lied", "checkpoint.every_n_steps=0", resume=True)
    assert read_metrics(directory) == read_metrics(whole)
    assert files(directory / "logprob_mismatch") == ["_SHA256SUMS", "step-000003.parquet", "step-000003.txt"], (
        "kept as evidence"
    )


def test_a_run_whose_samples_no_package_keeps_says_which_one_does(
    run: Run, lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "loop_observer:logprob_mismatch")
    lie(2.0, versions={0})
    with pytest.raises(BoundError, match="pip install rlcore-report"):
        run("run.name=lied")
    assert not (tmp_path / "runs" / "lied" / "logprob_mismatch").exists()


def test_the_table_holds_both_sides_at_the_weights_that_generated(run: Run, lie: Lie, tmp_path: Path) -> None:
    lie(2.0, versions={4})
    with pytest.raises(BoundError) as raised:
        run("logging.rollouts_every_n_steps=1")
    folder = tmp_path / "runs" / "run" / "logprob_mismatch"
    table = pandas.read_parquet(folder / "step-000003.parquet")
    assert table["rank"].tolist() == list(range(1, MAX_SAMPLES + 1))
    assert table["token_mult_prob_error"].is_monotonic_decreasing
    assert (table["trainer_version"] == 4).all()
    decode = FakeTokenizer().decode
    for _, row in table.iterrows():
        mask = row["loss_mask"]
        assert (row["weight_versions"][mask] == 4).all()
        assert decode(row["tokens"][~mask]) == row["prompt"]
        assert decode(row["tokens"][mask]) == row["response"]
        np.testing.assert_allclose(row["differences"][mask].round(3) % 2.0, 0.0, atol=1e-6)
        assert (row["differences"][~mask] == 0.0).all()
        difference = (row["trainer_logprobs"].astype(np.float64) - row["generation_logprobs"])[mask]
        assert row["token_mult_prob_error"] == pytest.approx(np.exp(np.abs(difference)).mean(), rel=1e-6)
        assert abs(row["differences"][row["worst_position"]]) == np.abs(row["differences"]).max()
    text = (folder / "step-000003.txt").read_text()
    assert text.startswith(str(raised.value).partition(". Worst token")[0])
    assert "those of weight version 4, before the update" in text
    assert text.count("sample ") == 3
    worst = table.iloc[0]
    position = worst["worst_position"]
    generation, trainer = (np.exp(worst[name][position]) for name in ("generation_logprobs", "trainer_logprobs"))
    assert f"{generation:.4g} in the generator and {trainer:.4g} in the trainer" in str(raised.value)
    (line,) = (line for line in text.splitlines() if line.split()[:2] == [str(position), "4"] and f"{generation:.4g}" in line)
    assert line.split()[2:5] == [f"{generation:.4g}", f"{trainer:.4g}", "+2.0000"]


def test_a_trainer_that_cannot_refuse_is_judged_after_its_update(run: Run, lie: Lie, tmp_path: Path) -> None:
    lie(2.0, versions={4})
    with pytest.raises(BoundError, match="The step is not saved"):
        run(registry=without_bounds())
    directory = tmp_path / "runs" / "run"
    assert files(directory / "checkpoints") == ["step-000002"]
    assert len(read_metrics(directory)) == 3
    table = pandas.read_parquet(directory / "logprob_mismatch" / "step-000003.parquet")
    assert (table["trainer_version"] == 5).all()
    assert (
        "after the update: this trainer returns none before it"
        in (directory / "logprob_mismatch" / "step-000003.txt").read_text()
    )
    lie(0.0, versions=())
    run(resume=True, registry=without_bounds())
    run("run.name=whole")
    assert read_metrics(directory) == read_metrics(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("missing", [(), (capabilities.METRIC_BOUNDS,)], ids=["refusing", "judged"])
def test_a_warning_costs_no_second_pass(
    run: Run, lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    """The worst samples are found by the log-probabilities of the update itself, those of the weights that generated."""
    passes = []
    for name in ("train_step", "get_logprobs"):
        record(monkeypatch, name, passes)
    lie(0.2, versions={4})
    run("run.num_steps=3", registry=without(*missing) if missing else None)
    assert passes == ["train_step"] * 6
    directory = tmp_path / "runs" / "run" / "logprob_mismatch"
    table = pandas.read_parquet(directory / "step-000003.parquet")
    assert (table["trainer_version"] == 4).all()
    for _, row in table.iterrows():
        differences = row["differences"][row["loss_mask"]]
        np.testing.assert_allclose(np.minimum(abs(differences), abs(differences - 0.2)), 0.0, atol=1e-5)
    assert "those of weight version 4, before the update" in (directory / "step-000003.txt").read_text()


def record(monkeypatch: pytest.MonkeyPatch, name: str, passes: list[str]) -> None:
    """Append the name of the trainer's hook to `passes` at each call."""
    original = getattr(TrainerHandle, name)

    def called(handle: TrainerHandle, request: Any) -> Any:
        passes.append(name)
        return original(handle, request)

    monkeypatch.setattr(TrainerHandle, name, called)


@pytest.mark.parametrize(
    "registry", [None, without(capabilities.STEP_LOGPROBS), without_bounds()], ids=["returned", "asked for", "judged"]
)
def test_a_warning_is_given_once_a_crossing_and_costs_nothing(
    run: Run, lie: Lie, tmp_path: Path, registry: Registry | None
) -> None:
    lie(0.2, versions={4, 6, 10})
    run("run.name=silent", "training.warn_token_mult_prob_error=inf", registry=registry)
    notes = Notes()
    run("run.name=warned", progress=notes, registry=registry)
    assert [note.partition(":")[0] for note in notes.texts] == ["step 3", "step 6"], "step 4 only goes on"
    assert all("expected at most 1.05 (training.warn_token_mult_prob_error)" in note for note in notes.texts)
    directory = tmp_path / "runs" / "warned"
    found = {record["step"] for record in read_metrics(directory)[1:] if record["token_mult_prob_error"] > 1.05}
    assert found == {3, 4, 6}
    names = [f"step-{step:06d}.{ending}" for step in (3, 6) for ending in ("parquet", "txt")]
    assert files(directory / "logprob_mismatch") == ["_SHA256SUMS", *names]
    assert read_metrics(directory) == read_metrics(tmp_path / "runs" / "silent")
    assert files(tmp_path / "runs" / "silent" / "logprob_mismatch") == []


def test_only_the_first_update_is_held_to_the_bound(run: Run, tmp_path: Path) -> None:
    """The others begin at weights that did not generate."""
    run("training.minibatches_per_step=4", "training.max_token_mult_prob_error=1.0001")
    assert files(tmp_path / "runs" / "run" / "logprob_mismatch") == []


Change = Callable[[TokenBatch], TokenBatch]


def widened(batch: TokenBatch) -> TokenBatch:
    """The loss takes the whole sequence, its prompt too."""
    mask = np.ones(batch.num_tokens, np.bool_)
    mask[batch.offsets[:-1]] = False
    return evolve(batch, loss_mask=mask)


def aged(batch: TokenBatch) -> TokenBatch:
    """The samples of the last sequence are of an older version."""
    versions = batch.token_columns[WEIGHT_VERSIONS].copy()
    last = versions[batch.offsets[-2] :]
    last[last >= 0] -= 1
    return batch.with_token_column(WEIGHT_VERSIONS, versions)


def without_versions(batch: TokenBatch) -> TokenBatch:
    kept = {name: column for name, column in batch.token_columns.items() if name != WEIGHT_VERSIONS}
    return evolve(batch, token_columns=kept)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (widened, "loss tokens were not generated at weight version 0"),
        (aged, "loss tokens were not generated at weight version 0"),
        (without_versions, "the training batch lacks weight_versions"),
    ],
)
def test_tokens_that_were_not_generated_at_these_weights_are_not_compared_which_is_noted_once(
    run: Run, lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, reason: str
) -> None:
    build = FakeAlgorithm.build_batch

    def build_batch(self: FakeAlgorithm, rollouts: RolloutBatch) -> TrainingBatch:
        return build(self, evolve(rollouts, batch=change(rollouts.batch)))

    monkeypatch.setattr(FakeAlgorithm, "build_batch", build_batch)
    lie(2.0, versions={0, 2})
    notes = Notes()
    run("run.num_steps=2", progress=notes)
    (note,) = (text for text in notes.texts if "not compared" in text)
    assert reason in note
    records = read_metrics(tmp_path / "runs" / "run")[1:]
    assert [record["updates"] for record in records] == [2.0, 2.0]
    assert not any(record.keys() & {*MISMATCH_METRICS} for record in records)
    assert files(tmp_path / "runs" / "run" / "logprob_mismatch") == []


def sampled_twice(batch: TokenBatch, of_older: float) -> TokenBatch:
    """Every second loss token is of older weights, which found it so much likelier."""
    older = batch.loss_mask & (np.arange(batch.num_tokens) % 2 == 1)
    versions = batch.token_columns[WEIGHT_VERSIONS] - older.astype(np.int32)
    logprobs = batch.token_columns[GENERATION_LOGPROBS] + np.float32(of_older) * older
    return batch.with_token_column(WEIGHT_VERSIONS, versions).with_token_column(GENERATION_LOGPROBS, logprobs)


LARGE = ("training.prompts_per_step=32", "environment.fake.num_train_rows=64", "run.num_steps=2", "checkpoint.every_n_steps=0")


def test_where_some_tokens_are_of_older_weights_the_others_are_compared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FakeAlgorithm.build_batch
    seen: list[TokenBatch] = []

    def build_batch(self: FakeAlgorithm, rollouts: RolloutBatch) -> TrainingBatch:
        seen.append(sampled_twice(rollouts.batch, 3.0))
        return build(self, evolve(rollouts, batch=seen[-1]))

    monkeypatch.setattr(FakeAlgorithm, "build_batch", build_batch)
    notes = Notes()
    run(*LARGE, "training.minibatches_per_step=1", progress=notes)
    del seen[0]  # the made-up samples of the check
    records = read_metrics(tmp_path / "runs" / "run")[1:]
    present = [batch.loss_mask & (batch.token_columns[WEIGHT_VERSIONS] == step) for step, batch in enumerate(seen)]
    assert [record["async/tokens_compared"] for record in records] == [np.count_nonzero(mask) for mask in present]
    assert [record["token_mult_prob_error"] for record in records] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert not notes.texts


def test_disagreement_on_tokens_of_the_present_weights_ends_a_run_that_trains_on_older_ones_too(
    run: Run, lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FakeAlgorithm.build_batch

    def build_batch(self: FakeAlgorithm, rollouts: RolloutBatch) -> TrainingBatch:
        return build(self, evolve(rollouts, batch=sampled_twice(rollouts.batch, 0.0)))

    monkeypatch.setattr(FakeAlgorithm, "build_batch", build_batch)
    lie(3.0, versions={2})
    with pytest.raises(BoundError) as raised:
        run(*LARGE)
    assert str(raised.value).startswith(
        "step 2: generator and trainer disagree on the sampled tokens: token_mult_prob_error is "
    )
    table = pandas.read_parquet(tmp_path / "runs" / "run" / "logprob_mismatch" / "step-000002.parquet")
    assert (table["trainer_version"] == 2).all()
    for _, row in table.iterrows():
        assert (row["weight_versions"][row["loss_mask"]] == 2).all(), "those alone that were compared"


def test_demonstrations_have_nothing_to_agree_with(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n' * 8)
    rows = ("data.train.source=jsonl", f"data.train.path={tmp_path / 'rows.jsonl'}")
    run("algorithm.fake.source=demonstrations", *rows, "run.num_steps=2", "training.max_token_mult_prob_error=1.0000001")
    assert files(tmp_path / "runs" / "run" / "logprob_mismatch") == []


def test_a_full_disk_does_not_hide_the_disagreement(
    run: Run, lie: Lie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", refuse)
    lie(2.0, versions={4})
    with pytest.raises(BoundError, match=r"token_mult_prob_error is 3\..*No space left"):
        run("logging.rollouts_every_n_steps=0", "logging.evaluation_answers=false")
