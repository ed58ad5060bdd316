"""Runs whose algorithm trains a critic beside the policy, with the fakes: who is asked what, and what a run keeps of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import (
    CheckContext,
    CheckpointError,
    ConfigError,
    ContractError,
    FinishReason,
    NonFiniteError,
    PluginError,
    Problem,
    RankInfo,
    RolloutBatch,
    TrainingBatch,
    TrainStepRequest,
    TrainStepResult,
    ValuesRequest,
    ValuesResult,
    capabilities,
    hookimpl,
)
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.algorithm import FakeAlgorithm
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
Prepare = Callable[..., RunPlan]
CRITIC = ("algorithm.fake.critic=true",)
FULL = (*CRITIC, "critic.learning_rate=0.05", "trainer.fake.initial_scale=0.3")

asked: list[tuple[str, TrainStepRequest | ValuesRequest]] = []
fails_at: list[int] = []
checked: list[CheckContext] = []


class RecordingTrainer(FakeTrainer):
    """Keeps what it is sent, by its head; the critic's updates fail where `fails_at` says."""

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        asked.append((self.context.head, request))
        if self.context.head == "value" and request.weight_version in fails_at:
            raise NonFiniteError("train_step: found loss nan; expected a finite one. State kept")
        return super().train_step(request)

    @hookimpl
    def get_values(self, request: ValuesRequest) -> ValuesResult:
        asked.append(("values", request))
        return super().get_values(request)


def registry(less: frozenset[str] = frozenset(), algorithm: type = FakeAlgorithm) -> Registry:
    trainer = evolve(
        FAKE_TRAINER, backend=f"{__name__}:{RecordingTrainer.__name__}", capabilities=FAKE_TRAINER.capabilities - less
    )
    own = evolve(FAKE_ALGORITHM, backend=f"{algorithm.__module__}:{algorithm.__name__}")
    return Registry.from_providers(
        {"trainer": [trainer], "generator": [FAKE_GENERATOR], "algorithm": [own], "environment": [FAKE_ENVIRONMENT]}
    )


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    asked.clear()
    fails_at.clear()


def updates(head: str) -> list[TrainStepRequest]:
    return [request for who, request in asked if who == head and isinstance(request, TrainStepRequest)]


def test_values_come_before_the_updates_of_the_policy_and_of_the_critic(run: Run, tmp_path: Path) -> None:
    run(*FULL, "run.num_steps=2", registry=registry())
    assert [who for who, _ in asked] == ["values", "tokens", "tokens", "value", "value"] * 2
    for of_policy, of_critic in zip(updates("tokens"), updates("value"), strict=True):
        assert of_policy.schedule_step == of_critic.schedule_step
        assert of_policy.counts == of_critic.counts
        tokens = [np.sort(np.concatenate([b.tokens for b in request.microbatches])) for request in (of_policy, of_critic)]
        np.testing.assert_array_equal(*tokens)
    metrics = read_metrics(tmp_path / "runs" / "run")
    assert {"critic/loss", "critic/grad_norm", "critic/learning_rate", "critic/squared_error"} <= metrics[-1].keys()
    assert metrics[-1]["critic/learning_rate"] == 0.05
    assert metrics[-1]["learning_rate"] == 0.1


def test_a_critic_learns_what_is_earned(run: Run, tmp_path: Path) -> None:
    """Its error falls below that of telling 0, which it begins with."""
    run(*FULL, "critic.learning_rate=0.01", "run.num_steps=8")
    last = read_metrics(tmp_path / "runs" / "run")[-1]
    assert last["critic/squared_error"] < 0.5 * (last["reward_mean"] ** 2 + last["reward_std"] ** 2)


def test_a_warm_up_trains_the_critic_alone_and_the_policys_schedule_begins_after_it(run: Run, tmp_path: Path) -> None:
    options = ("critic.warmup_steps=2", "schedule.decay=linear", "schedule.warmup_steps=2")
    run(*FULL, "run.num_steps=4", *options, registry=registry())
    assert [request.schedule_step for request in updates("value")] == list(range(8))
    assert [request.schedule_step for request in updates("tokens")] == list(range(4))
    metrics = [line for line in read_metrics(tmp_path / "runs" / "run") if line["step"]]
    assert [line["weight_version"] for line in metrics] == [0, 0, 2, 4]
    assert [line["updates"] for line in metrics] == [0, 0, 2, 2]
    assert all("critic/loss" in line for line in metrics)


def test_the_policys_plan_ends_with_the_run(prepared: Prepare) -> None:
    plan = prepared(*FULL, "critic.warmup_steps=2", "critic.max_grad_norm=0.5", "optimizer.weight_decay=0.1")
    critic = plan.critic_context(RankInfo())
    assert critic is not None
    assert plan.trainer_context(RankInfo()).num_train_steps == 4 * 2
    assert critic.num_train_steps == 6 * 2
    assert (critic.head, critic.lora, critic.needs_reference) == ("value", None, False)
    assert critic.model == plan.model
    own = critic.optimizer
    assert (own.learning_rate, own.max_grad_norm, own.weight_decay) == (0.05, 0.5, 0.1)


def test_a_resumed_run_equals_one_that_was_not_stopped(run: Run, tmp_path: Path) -> None:
    run(*FULL, "run.num_steps=6")
    whole = read_metrics(tmp_path / "runs" / "run")
    run(*FULL, "run.num_steps=3", "run.name=parts")
    run(*FULL, "run.num_steps=6", "run.name=parts", resume=True)
    parts = read_metrics(tmp_path / "runs" / "parts")
    assert [line for line in parts if line["step"] > 3] == [line for line in whole if line["step"] > 3]
    for folder in ("trainer", "critic"):
        states = [
            np.load(tmp_path / "runs" / name / "checkpoints" / "step-000006" / folder / "fake_trainer.npz")
            for name in ("run", "parts")
        ]
        assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0].files)


def test_what_refuses_the_critics_update_leaves_what_was_done_before_it(run: Run, tmp_path: Path) -> None:
    """The policy's updates of that step count, as do those before a policy's update that is refused."""
    fails_at.append(3)  # the second update of step 2
    with pytest.raises(NonFiniteError):
        run(*FULL, "run.num_steps=3", "checkpoint.every_n_steps=1", registry=registry())
    state = json.loads((tmp_path / "runs" / "run" / "checkpoints" / "step-000001" / "loop.json").read_text())
    assert (state["step"], state["weight_version"], state["critic_version"]) == (1, 2, 2)
    fails_at.clear()
    run(*FULL, "run.num_steps=3", registry=registry(), resume=True)
    assert [line["step"] for line in read_metrics(tmp_path / "runs" / "run") if line["step"]] == [1, 2, 3]


def test_another_critic_is_another_run(run: Run) -> None:
    run(*FULL, "run.num_steps=1")
    with pytest.raises(Exception, match="critic.path"):
        run(*FULL, "run.num_steps=2", "critic.path=values", resume=True)


def test_a_run_without_a_critic_is_not_gone_on_with_one(run: Run) -> None:
    run("run.num_steps=1")
    with pytest.raises(CheckpointError, match="holds no critic"):
        run(*FULL, "run.num_steps=2", resume=True, allow_changes=True)


def test_an_evaluation_alone_builds_no_critic(prepared: Prepare) -> None:
    plan = prepared(*FULL)
    assert plan.critic is not None
    assert evolve(plan, evaluating=True).critic_context(RankInfo()) is None


def test_a_critic_begins_with_the_model_that_is_named(prepared: Prepare) -> None:
    plan = prepared(*CRITIC, "critic.path=values")
    context = plan.critic_context(RankInfo())
    assert context is not None
    assert context.model.path == "values"
    built = FakeTrainer(evolve(context, seed=3), FakeTrainerConfig(initial_scale=1.0))
    assert built.weights["score.weight"].any(), "the head of the model that was named"


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("critic.learning_rate=0.1",), "critic"),
        ((*CRITIC, "critic.warmup_steps=6"), "critic.warmup_steps"),
        ((*CRITIC, "critic.revision=main"), "critic.revision"),
    ],
)
def test_a_section_that_does_nothing_is_refused(prepared: Prepare, overrides: tuple[str, ...], path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(*overrides)
    assert path in [problem.path for problem in raised.value.problems]


def test_a_trainer_without_values_is_refused(prepared: Prepare) -> None:
    with pytest.raises(PluginError, match="value_head"):
        prepared(*CRITIC, registry=registry(less=frozenset({capabilities.VALUE_HEAD})))


def noted(context: CheckContext, config: FakeTrainerConfig) -> tuple[Problem, ...]:
    checked.append(context)
    return ()


def test_the_trainers_check_sees_policy_and_critic(prepared: Prepare) -> None:
    checked.clear()
    trainer = evolve(FAKE_TRAINER, check=f"{__name__}:noted")
    own = Registry.from_providers(
        {"trainer": [trainer], "generator": [FAKE_GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    )
    prepared(*CRITIC, "critic.path=values", registry=own)
    assert [(context.head, context.model.path) for context in checked] == [("tokens", "none"), ("value", "values")]
    assert {context.critic.path for context in checked if context.critic is not None} == {"values"}
    assert all(context.critic is not None for context in checked)


def test_a_trainer_that_cannot_write_it_is_refused(prepared: Prepare) -> None:
    with pytest.raises(PluginError, match="save_hf"):
        prepared(*CRITIC, "critic.export=true")


class Forgetful(FakeAlgorithm):
    """Asks for a critic, and has nothing to train it with."""

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        return evolve(super().build_batch(rollouts), critic_loss=None)


class Groundless(FakeAlgorithm):
    """Trains a critic that it has not asked for."""

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        training = super().build_batch(rollouts)
        return evolve(training, critic_loss=training.loss)


def test_an_algorithm_names_the_critics_loss_where_it_has_one_and_only_then(run: Run) -> None:
    with pytest.raises(ContractError, match="critic_loss"):
        run(*CRITIC, registry=registry(algorithm=Forgetful))
    with pytest.raises(ContractError, match="critic_loss"):
        run("run.name=other", registry=registry(algorithm=Groundless))


class SeesLimits(FakeAlgorithm):
    """Keeps what it is told of limits."""

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        limits.append((rollouts.truncated.tolist(), rollouts.finish_reasons.tolist()))
        return super().build_batch(rollouts)


limits: list[tuple[list[bool], list[int]]] = []


def test_an_episode_that_a_limit_of_turns_ends_is_told_from_one_that_has_ended(run: Run) -> None:
    for name, max_turns in (("ended", 2), ("cut", 1)):
        turns = ("environment.fake.num_turns=2", f"rollout.max_turns={max_turns}", "rollout.max_response_tokens=60")
        run(*FULL, f"run.name={name}", "run.num_steps=1", *turns, registry=registry(algorithm=SeesLimits))
    _, (ended, _), _, (cut, reasons) = limits  # before each run, the made-up samples of the check
    assert not all(ended)
    assert all(cut)
    assert FinishReason.STOP in reasons
