"""Runs that fail under way: what is said, what is kept, and that they go on from there as if nothing had happened."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from .system_support import (  # type: ignore[import-not-found]
    Site,
    Workplace,
    checkpoints,
    contents,
    expect_failure,
    read_metrics,
    write_jsonl,
)

JUDGE = '''
import asyncio
import time
from typing import Literal
from attrs import frozen
from rlcore.spi import Observation, Provider, ResetResult, StepResult, capabilities

@frozen(kw_only=True)
class JudgeConfig:
    """`[environment.verdict]`"""
    failure: Literal["none", "raises", "hangs", "blocks", "nan"] = "none"
    """What happens to the prompt in `on`."""
    on: str = "6="
    """The prompt."""

class Judge:
    def __init__(self, context, config):
        self.config = config

    def rows(self, split):
        return [{"prompt": f"{digit}="} for digit in (range(8) if split == "train" else (8, 9))]

    async def reset(self, row, seed):
        return ResetResult(observation=Observation(text=row["prompt"]), state=row["prompt"])

    async def step(self, state, turn):
        failure = self.config.failure if state == self.config.on else "none"
        if failure == "raises":
            raise ConnectionError("the judge does not answer")
        if failure == "hangs":
            await asyncio.sleep(3600)
        if failure == "blocks":
            time.sleep(2.5)
        reward = float("nan") if failure == "nan" else sum(map(turn.text.count, "13579"))
        return StepResult(reward=reward, done=True, success=reward > 1)

CAPABILITIES = {capabilities.CHEAP_RESET}
PROVIDER = Provider(name="verdict", spi=(2, 0), config=JudgeConfig, backend="acme_judge:Judge", capabilities=CAPABILITIES)
'''
"""An environment that rewards odd digits and fails on one prompt."""

POISON = '''
from typing import Literal
from attrs import frozen
from rlcore.spi import AlgorithmNeeds, LossOutput, LossSpec, Provider, TrainingBatch

@frozen(kw_only=True)
class PoisonConfig:
    """`[algorithm.poison]`"""
    token: int = -1
    """Makes the loss NaN where a batch holds it; token 12 + i is the i-th of "+-*="."""
    how: Literal["nan", "metric", "raise"] = "nan"
    """Or makes a metric NaN, or raises."""

class Poison:
    def __init__(self, context, config):
        self.needs = AlgorithmNeeds(source="demonstrations")
        self.config = config

    def build_batch(self, rollouts):
        tokens = rollouts.batch.tokens.astype("int32")
        batch = rollouts.batch.with_token_column("ids", tokens)
        return TrainingBatch(batch=batch, loss=LossSpec(path="acme_poison:loss", config=self.config, token_columns=("ids",)))

def loss(inputs, config):
    value = -(inputs.logprobs * inputs.loss_mask).sum() / inputs.counts.num_loss_tokens
    metric = value.detach()
    if (inputs.token_columns["ids"] == config.token).any():
        if config.how == "raise":
            raise ZeroDivisionError("found the token")
        value, metric = (value * float("nan"), metric) if config.how == "nan" else (value, metric * float("nan"))
    return LossOutput(loss=value, sums={"nll": metric})

PROVIDER = Provider(name="poison", spi=(2, 0), config=PoisonConfig, backend="acme_poison:Poison")
'''
"""Maximum likelihood whose loss is not finite on batches with a certain token."""

RUN = (
    "environment.name=verdict",
    "rollout.max_prompt_tokens=4",
    "run.num_steps=4",
    "evaluation.every_n_steps=2",
    "data.train.shuffle=false",
)
"""Steps 2 and 4 of four prompts each have the prompt "6="; after steps 2 and 4 it evaluates "8=" and "9="."""


def toml(text: str) -> str:
    """A text that looks like something else, as a TOML string."""
    return f'"{text}"'


@pytest.fixture
def judge(site: Site) -> None:
    site.install("acme-judge", JUDGE, {"rlcore.environments": {"verdict": "PROVIDER"}})


@pytest.fixture
def poison(site: Site) -> None:
    site.install("acme-poison", POISON, {"rlcore.algorithms": {"poison": "PROVIDER"}})


# Environments


@pytest.mark.wide(keep=["raises-parts0"])  # the others in tests/rollout
@pytest.mark.parametrize(
    ("failure", "parts"),
    [
        ("raises", ("raised ConnectionError: the judge does not answer", "episode 8 of 16")),
        ("hangs", ("took longer than 2 s (rollout.environment_timeout_s)",)),
        ("blocks", ("neither returned nor let itself be cancelled within 2 s", "acme_judge.py", "in step", "episode 8 of 16")),
        ("nan", ("returned the reward nan; expected a finite number", "episode 8 of 16")),
    ],
)
@pytest.mark.usefixtures("judge")
def test_a_reward_that_fails_ends_the_run_and_costs_no_step(workplace: Workplace, failure: str, parts: tuple[str, ...]) -> None:
    arguments = ("grpo.toml", *RUN, "checkpoint.every_n_steps=0")
    whole = workplace.train(*arguments, "run.name=whole")
    broken = ("run.name=broken", "rollout.environment_timeout_s=2", f"environment.verdict.failure={toml(failure)}")
    result = workplace.rlcore("train", *arguments, *broken)
    expect_failure(result, 8, *parts, 'rollout.on_environment_error = "mask"', "The state after step 1 is in", "--resume")
    assert checkpoints(workplace.run("broken")) == ["step-000001"]
    mended = workplace.train(*arguments, "run.name=broken", "--resume")
    assert read_metrics(mended) == read_metrics(whole)


@pytest.mark.wide(keep=["hangs"])
@pytest.mark.parametrize("failure", ["raises", "hangs", "nan"])
@pytest.mark.usefixtures("judge")
def test_a_reward_that_fails_is_masked_and_counted(workplace: Workplace, failure: str) -> None:
    options = (
        "rollout.on_environment_error=mask",
        "rollout.environment_timeout_s=2",
        f"environment.verdict.failure={toml(failure)}",
    )
    run = workplace.train("grpo.toml", *RUN, *options)
    records = read_metrics(run)
    assert [record["environment/failed"] for record in records[1:]] == [0, 4, 0, 4]
    assert all(record["updates"] == 1 for record in records[1:])
    import pandas

    samples = pandas.read_parquet(run / "rollouts" / "step-000002.parquet").set_index("prompt")
    assert not samples.loc["6=", "valid"].any()
    assert not any(mask.any() for mask in samples.loc["6=", "loss_mask"])
    assert samples.drop("6=")["valid"].all()


@pytest.mark.usefixtures("judge")
def test_an_evaluation_that_fails_costs_neither_the_step_before_it_nor_itself(workplace: Workplace) -> None:
    arguments = ("grpo.toml", *RUN, "evaluation.at_start=false", "checkpoint.every_n_steps=0")
    whole = workplace.train(*arguments, "run.name=whole")
    broken = ("run.name=broken", "environment.verdict.on=9=", "environment.verdict.failure=raises")
    for _ in range(2):
        result = workplace.rlcore("train", *arguments, *broken)
        expect_failure(result, 8, "the judge does not answer", "state '9='", "The state after step 2 is in")
        arguments = (*arguments, "--resume")
    mended = workplace.train(*arguments, "run.name=broken")
    assert read_metrics(mended) == read_metrics(whole)


# Losses that are not finite

ROWS = ("data.train.source=jsonl", "data.train.path=data.jsonl", "data.train.shuffle=false")


def write_rows(workplace: Workplace, *, poisoned: int) -> None:
    """20 demonstrations, four a step, one of which holds the token 14."""
    rows = [{"prompt": "1*1=" if a == poisoned else f"{a % 10}+1=", "completion": str(a)} for a in range(20)]
    write_jsonl(workplace.folder / "data.jsonl", rows)


def test_a_learning_rate_beyond_all_bounds(workplace: Workplace) -> None:
    result = workplace.rlcore("train", "grpo.toml", "optimizer.learning_rate=1e30", "evaluation.at_start=false")
    message = expect_failure(result, 7, "train_step at weight version 1", "trainer 'fsdp2'", "The state after step")
    run = workplace.run("run")
    assert checkpoints(run) == [f"step-{read_metrics(run)[-1]['step']:06d}"]
    again = workplace.rlcore("train", "grpo.toml", "--resume")
    assert expect_failure(again, 7, "remove that folder").splitlines()[-1] == message.splitlines()[-1]


def test_poisoned_weights(workplace: Workplace, model: Path) -> None:
    import shutil

    from safetensors.numpy import load_file, save_file

    poisoned = shutil.copytree(model, workplace.folder / "poisoned")
    tensors = load_file(poisoned / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    for recipe in ("grpo.toml", "sft.toml"):
        result = workplace.rlcore("train", recipe, "model.path=poisoned")
        expect_failure(result, 5, "NaN or infinite numbers in model.norm.weight")
        assert checkpoints(workplace.run("run" if recipe == "grpo.toml" else "sft")) == []


def state_of(run: Path, step: int) -> dict[str, Any]:
    """The trainer's tensors in a checkpoint."""
    file = run / "checkpoints" / f"step-{step:06d}" / "trainer" / "trainer-00000.safetensors"
    with safe_open(file, "np") as tensors:
        return {name: tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118


@pytest.mark.wide(keep=["nan"])
@pytest.mark.parametrize("how", ["nan", "metric"])
@pytest.mark.usefixtures("poison")
def test_a_loss_that_is_nan_is_refused_and_the_state_before_it_saved(workplace: Workplace, how: str) -> None:
    arguments = ("sft.toml", "algorithm.name=poison", f"algorithm.poison.how={toml(how)}", "checkpoint.every_n_steps=0")
    data = (
        "data.train.source=jsonl",
        "data.train.path=data.jsonl",
        "data.train.shuffle=false",
        "run.num_steps=5",
        "checkpoint.keep=1",
    )
    write_rows(workplace, poisoned=14)
    whole = workplace.train(*arguments, *data, "run.name=whole")
    result = workplace.rlcore("train", *arguments, *data, "run.name=broken", "algorithm.poison.token=14")
    what = "the metric nll is nan" if how == "metric" else "the loss is nan"
    parts = ("train_step at weight version 3", what, "the step is refused and the state before it kept", "trainer 'fsdp2'")
    expect_failure(result, 7, *parts, "The state after step 3 is in")
    workplace.train(*arguments, *data, "run.name=three", "run.num_steps=3")
    assert state_of(workplace.run("broken"), 3) == state_of(workplace.run("three"), 3)
    mended = workplace.train(*arguments, *data, "run.name=broken", "--resume")
    assert read_metrics(mended) == read_metrics(whole)


@pytest.mark.usefixtures("poison")
def test_updates_before_the_refused_one_of_a_step_are_kept(workplace: Workplace) -> None:
    write_rows(workplace, poisoned=10)
    data = (*ROWS, "training.minibatches_per_step=4")
    arguments = ("sft.toml", "algorithm.name=poison", "checkpoint.every_n_steps=1", "checkpoint.keep=1", *data)
    result = workplace.rlcore("train", *arguments, "algorithm.poison.token=14", "run.num_steps=3")
    expect_failure(result, 7, "the loss is nan", "The state after step 2 is in")
    # The checkpoint of step 2 was there, so nothing was written over it; without it the updates would be in the new one.
    state = json.loads((workplace.run("sft") / "checkpoints" / "step-000002" / "loop.json").read_text())
    assert state["weight_version"] == 8
    result = workplace.rlcore(
        "train", *arguments, "algorithm.poison.token=14", "run.num_steps=3", "checkpoint.every_n_steps=0", "run.name=other"
    )
    expect_failure(result, 7, "the loss is nan")
    state = json.loads((workplace.run("other") / "checkpoints" / "step-000002" / "loop.json").read_text())
    assert 8 <= state["weight_version"] < 12
    assert state["unlogged"] is None
    finished = workplace.train(*arguments, "run.num_steps=3", "run.name=other", "--resume")
    assert read_metrics(finished)[-1]["weight_version"] == state["weight_version"] + 4


@pytest.mark.usefixtures("poison")
def test_a_loss_that_raises_leaves_the_checkpoint_before_it(workplace: Workplace) -> None:
    write_rows(workplace, poisoned=14)
    options = ("algorithm.name=poison", "algorithm.poison.token=14", "algorithm.poison.how=raise")
    result = workplace.rlcore("train", "sft.toml", *options, *ROWS)
    message = expect_failure(result, 70, "unexpected ZeroDivisionError: found the token", "in train_step of trainer 'fsdp2'")
    assert "The state after step 2 is in" in message
    assert checkpoints(workplace.run("sft")) == ["step-000002"]
    (file,) = workplace.run("sft").glob("traceback-*.txt")
    assert "acme_poison.py" in file.read_text()


@pytest.mark.usefixtures("poison")
def test_what_is_saved_on_an_error_drops_no_earlier_checkpoint(workplace: Workplace) -> None:
    write_rows(workplace, poisoned=14)
    data = (*ROWS, "checkpoint.keep=1")
    result = workplace.rlcore("train", "sft.toml", "algorithm.name=poison", "algorithm.poison.token=14", *data)
    expect_failure(result, 7, "The state after step 3 is in")
    assert checkpoints(workplace.run("sft")) == ["step-000002", "step-000003"]


# Nothing to learn from


def test_equal_rewards_are_noted_and_make_no_update(workplace: Workplace) -> None:
    arguments = (
        "grpo.toml",
        "environment.arithmetic.min_operand=7",
        "environment.arithmetic.num_train=4",
        "environment.arithmetic.num_evaluation=2",
        "environment.arithmetic.partial_credit=0.0",
        "rollout.max_response_tokens=1",
    )
    result = workplace.rlcore("train", *arguments)
    assert result.exit_code == 0, result.stderr
    for step in range(1, 5):
        assert f"warning: step {step} has nothing to learn from: the rewards of each of the 4 groups are all" in result.stdout
    records = read_metrics(workplace.run("run"))
    assert [(record["updates"], record["weight_version"]) for record in records[1:]] == [(0.0, 0.0)] * 4
    failed = workplace.rlcore("train", *arguments, "training.on_no_signal=error", "run.name=strict")
    expect_failure(failed, 8, "step 1 has nothing to learn from", "training.on_no_signal=skip")


# Checkpoints and disks


def test_a_checkpoint_of_another_model_is_refused_and_untouched(workplace: Workplace, other_model: Path) -> None:
    run = workplace.train("grpo.toml", "run.num_steps=2")
    before = contents(run)
    result = workplace.rlcore("train", "grpo.toml", f"model.path={other_model}", "--resume")
    expect_failure(result, 6, "runs/run holds another run", "of another model", "choose another run.name")
    assert contents(run) == before
    result = workplace.rlcore(
        "eval", "grpo.toml", f"model.path={other_model}", "--checkpoint", run / "checkpoints" / "step-000002"
    )
    expect_failure(result, 6, "belongs to another model")
    assert read_metrics(workplace.train("grpo.toml", "--resume"))[-1]["step"] == 4


def test_a_checkpoint_that_is_none_or_damaged(workplace: Workplace, model: Path) -> None:
    expect_failure(
        workplace.rlcore("eval", "grpo.toml", "--checkpoint", model), 6, "no intact checkpoint", "checkpoints/step-N"
    )
    run = workplace.train("grpo.toml")
    weights = run / "checkpoints" / "step-000004" / "trainer" / "trainer-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    expect_failure(
        workplace.rlcore("eval", "grpo.toml", "--checkpoint", weights.parents[1]), 6, "trainer-00000.safetensors has"
    )
    result = workplace.rlcore("train", "grpo.toml", "--resume", "run.num_steps=3")
    expect_failure(result, 6, "would be gone")
    result = workplace.rlcore("train", "grpo.toml", "--resume")
    assert result.exit_code == 0
    assert "warning: checkpoint step-000004 is damaged and passed over" in result.stdout
    assert [record["step"] for record in read_metrics(run)] == [0, 1, 2, 3, 4]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The operating system refuses to let a file grow beyond this, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_a_checkpoint_costs_nothing_before_it(workplace: Workplace) -> None:
    arguments = ("grpo.toml", "evaluation.at_end=false")
    whole = workplace.train(*arguments, "run.name=whole")
    run = workplace.train(*arguments, "run.num_steps=2")
    before = contents(run / "checkpoints")
    with largest_file(100_000):
        result = workplace.rlcore("train", *arguments, "--resume")
    expect_failure(result, 11, os.strerror(errno.EFBIG), "run/checkpoints", "The state after step 2 is in", "--resume")
    assert contents(run / "checkpoints") == before
    workplace.train(*arguments, "--resume")
    assert read_metrics(run) == read_metrics(whole)


def test_a_disk_that_refuses_the_exported_model(workplace: Workplace) -> None:
    with largest_file(100_000):
        options = ("checkpoint.export=hf", "checkpoint.at_end=false", "checkpoint.every_n_steps=0")
        result = workplace.rlcore("train", "grpo.toml", *options)
    expect_failure(result, 11, os.strerror(errno.EFBIG), "All steps are done; --resume writes what is missing")
    run = workplace.run("run")
    assert not [path.name for path in run.iterdir() if "model" in path.name]
    records = read_metrics(run)
    workplace.train("grpo.toml", "checkpoint.export=hf", "--resume")
    assert (run / "model" / "model.safetensors").exists()
    assert read_metrics(run) == records


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_no_space_left_on_the_device(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    import rlcore_fsdp2.checkpoint

    def refuse(*arguments: Any) -> None:
        if kind is OSError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    run = workplace.train("grpo.toml", "run.num_steps=2")
    monkeypatch.setattr(rlcore_fsdp2.checkpoint, "save_file", refuse)
    result = workplace.rlcore("train", "grpo.toml", "--resume")
    expect_failure(result, 11, "No space left on device", "Make room, or point run.directory elsewhere")
    assert checkpoints(run) == ["step-000002"]


def test_a_run_directory_that_cannot_be_made(workplace: Workplace) -> None:
    (workplace.folder / "runs").write_text("a file")
    expect_failure(workplace.rlcore("train", "grpo.toml"), 2, "run.directory", "no folder")


def test_a_run_that_is_there_is_not_overwritten(workplace: Workplace) -> None:
    run = workplace.train("grpo.toml", "run.num_steps=1")
    before = contents(run)
    expect_failure(workplace.rlcore("train", "grpo.toml"), 6, "already holds a run", "--resume", "run.name")
    expect_failure(workplace.rlcore("train", "grpo.toml", "--resume", "run.name=absent"), 6, "nothing to resume")
    assert contents(run) == before
