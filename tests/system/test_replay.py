"""Runs ahead of training with real engines, replayed: the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, Site, Workplace, contents, read_metrics  # type: ignore[import-not-found]

JUDGE = '''
from rlcore.spi import Observation, Provider, ResetResult, StepResult, capabilities
from attrs import frozen


@frozen(kw_only=True)
class JudgeConfig:
    """`[environment.verdict]`"""
    num_turns: int = 1
    """Turns of an episode."""


class Judge:
    """Each turn is worth something, whatever is said."""

    def __init__(self, context, config):
        self.num_turns = config.num_turns

    def rows(self, split):
        return [{"prompt": f"{first}+{second}="} for first in range(8) for second in range(8)]

    async def reset(self, row, seed):
        return ResetResult(observation=Observation(text=row["prompt"]), state=0)

    async def step(self, state, turn):
        reward = sum(map(ord, turn.text)) % 7 / 6
        done = state + 1 == self.num_turns
        shown = None if done else Observation(text="=")
        return StepResult(reward=reward, done=done, observation=shown, state=state + 1, success=reward > 0.5)


ENVIRONMENT = Provider(
    name="verdict", spi=(2, 0), config=JudgeConfig, backend="acme_judge:Judge", capabilities={capabilities.CHEAP_RESET}
)
'''
AHEAD = (
    "async.max_staleness=2",
    "environment.name=verdict",
    "evaluation.at_end=false",
    "evaluation.at_start=false",
    "logging.rollouts_every_n_steps=0",
    "rollout.max_response_tokens=330",
    "run.num_steps=5",
)
VLLM = ("generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1")


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so many characters that it seldom says the one which ends a turn: turns differ in length, and are cut."""
    alphabet = DIGITS + "".join(map(chr, range(0x4E00, 0x4E2C)))
    folder = tmp_path_factory.mktemp("talkative")
    return make_model(folder / "model", "qwen3", alphabet=alphabet, max_length=350, hidden_size=64, num_heads=2)


@pytest.fixture
def train(workplace: Workplace, site: Site, talkative: Path) -> Callable[..., Path]:
    """A run of this name, ahead of training."""
    site.install("acme-judge", JUDGE, {"rlcore.environments": {"verdict": "ENVIRONMENT"}})

    def run(name: str, *options: str) -> Path:
        return workplace.train("grpo.toml", *AHEAD, f"model.path={talkative}", f"run.name={name}", *options)

    return run


def steps(run: Path) -> list[dict[str, Any]]:
    """The steps of a schedule; turns were cut by the end of one, and went on with the next weights."""
    found = [json.loads(line) for line in (run / "schedule.jsonl").read_text().splitlines()[1:]]
    turns = [turn for step in found for group in step["groups"] for sample in group["samples"] for turn in sample["turns"]]
    assert max(map(len, turns)) > 1, "no turn was cut"
    return found


def weights(run: Path) -> dict[str, bytes]:
    return contents(run / "checkpoints" / "step-000005" / "trainer")


def assert_same(run: Path, other: Path) -> None:
    """The same weights and figures, to the last bit."""
    assert read_metrics(run) == read_metrics(other)
    assert weights(run) == weights(other)
    assert steps(run) == steps(other)


@pytest.mark.wide(keep=["transformers"])
@pytest.mark.parametrize("generator", [(), VLLM], ids=["transformers", "vllm"])
def test_of_one_turn_it_is_the_run_to_rounding(train: Callable[..., Path], generator: tuple[str, ...]) -> None:
    """How many prompts the generator finds when it looks is chance in the run, and less than four rows are multiplied otherwise
    than more: the same tokens, whose log-probabilities may have other last digits."""
    options = (*generator, 'checkpoint.export="hf"')
    first = train("first", *options)
    again, third = (train(name, *options, "--replay-schedule", str(first / "schedule.jsonl")) for name in ("again", "third"))
    assert_same(again, third)
    assert steps(again) == steps(first)
    for record, line in zip(read_metrics(again), read_metrics(first), strict=True):
        assert line["updates"] == 1.0
        assert record == pytest.approx(line, rel=1e-3, abs=1e-4)
    trained = load_file(first / "model" / "model.safetensors")
    for name, tensor in load_file(again / "model" / "model.safetensors").items():
        assert (tensor - trained[name]).norm() <= 1e-4 * trained[name].norm(), name


def test_of_several_turns_replays_have_the_same_weights(train: Callable[..., Path]) -> None:
    """Turns begin in rounds there, and in the run whenever they were ready: its log-probabilities have other last digits."""
    turns = ("rollout.max_turns=2", "environment.verdict.num_turns=2")
    first = train("first", *turns)
    again, third = (train(name, *turns, "--replay-schedule", str(first / "schedule.jsonl")) for name in ("again", "third"))
    assert_same(again, third)
    numbers = [[[group["number"] for group in step["groups"]] for step in steps(run)] for run in (first, again)]
    assert numbers[0] == numbers[1]
