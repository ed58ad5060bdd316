"""PPO with real backends: resumption, a critic that begins with another's weights, conversations, older samples, bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import rlcore
from rlcore.spi import RlcoreError
from rlcore_torchkit.testing.models import make_model

RECIPE = """\
[model]
path = "{model}"
[run]
num_steps = 3
[algorithm]
name = "ppo"
[critic]
learning_rate = 0.01
export = true
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 9
num_train = 32
num_evaluation = 8
partial_credit = 0.5
[rollout]
samples_per_prompt = 1
max_prompt_tokens = 4
max_response_tokens = 4
[training]
prompts_per_step = 8
minibatches_per_step = 2
[optimizer]
learning_rate = 0.005
[sinks]
names = []
[checkpoint]
every_n_steps = 1
export = "hf"
"""
Train = Callable[..., Path]


@pytest.fixture
def train(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """train(name, *overrides, resume=False) -> the run directory."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "ppo.toml"
    recipe.write_text(RECIPE.format(model=model))

    def run(name: str, *overrides: str, resume: bool = False) -> Path:
        rlcore.train(recipe, f"run.name={name}", *overrides, resume=resume, progress="silent")
        return tmp_path / "runs" / name

    return run


def lines_of(directory: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith("time/") and "per_second" not in name}
        for line in records
    ]


@pytest.mark.wide(keep=["fsdp2"])
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_a_resumed_run_equals_one_that_was_not_stopped_to_the_last_bit(train: Train, trainer: str) -> None:
    whole = train("whole", f"trainer.name={trainer}")
    train("parts", f"trainer.name={trainer}", "run.num_steps=2")
    parts = train("parts", f"trainer.name={trainer}", resume=True)
    assert lines_of(parts) == lines_of(whole)
    for folder in ("model", "critic"):
        first, second = (load_file(directory / folder / "model.safetensors") for directory in (whole, parts))
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_critic_goes_on_from_another_runs_and_learns_where_steps_overlap(train: Train) -> None:
    """Samples of older weights get the values of the present critic."""
    first = train("first", "trainer.name=fsdp2")
    second = train("second", "trainer.name=fsdp2", f"critic.path={first / 'critic'}", "async.max_staleness=1")
    assert lines_of(first)[0]["critic/value_mean"] == 0.0
    assert lines_of(second)[0]["critic/value_mean"] != 0.0
    assert len(lines_of(second)) == 3


def test_where_sampling_is_cut_the_policy_alone_is_told_of_the_tokens_that_were_kept(train: Train) -> None:
    lines = lines_of(train("cut", "trainer.name=fsdp2", "rollout.top_p=0.7", "run.num_steps=2"))
    assert [line["updates"] for line in lines] == [2, 2]
    assert all("critic/loss" in line for line in lines)


@pytest.mark.parametrize("beside", ["tokenizer", "vocabulary"])
def test_a_critic_of_other_tokens_is_refused(train: Train, tmp_path: Path, beside: str) -> None:
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789" if beside == "tokenizer" else "0123"
    other = make_model(tmp_path / "other", "qwen3", alphabet=alphabet, max_length=64)
    with pytest.raises(RlcoreError, match="critic.path"):
        train("run", "trainer.name=fsdp2", f"critic.path={other}")
    assert not (tmp_path / "runs").exists()
