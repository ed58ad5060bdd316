"""Faults of a recipe's model are found, for trainers and generators alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.model_check import (
    config_file,
    float8_notes,
    model_config,
    position_problems,
    routing_problems,
    too_few_positions,
    trained_model_problems,
)


@pytest.fixture
def context(model_directory: Callable[[str], Path]) -> CheckContext:
    """Of a model of 512 positions, all of which the recipe needs."""
    model = ModelSpec(path=str(model_directory("qwen3")))
    return CheckContext(model=model, device="cpu", world_size=1, max_sequence_length=512)


def with_config(context: CheckContext, directory: Path, content: str) -> CheckContext:
    (directory / "config.json").write_text(content)
    return evolve(context, model=ModelSpec(path=str(directory)))


def edited(context: CheckContext, directory: Path, **changes: Any) -> CheckContext:
    return with_config(context, directory, json.dumps(json.loads(config_file(context).read_text()) | changes))


def found(context: CheckContext) -> list[tuple[str, str]]:
    return [(problem.path, problem.found) for problem in trained_model_problems(context)]


def test_float8_is_noted_below_the_width_at_which_it_pays(context: CheckContext) -> None:
    model = model_config(context)
    for width, expected in ((4080, ["trainer.mine.fp8"]), (4096, [])):
        dims = ModelDims.of({**model, "hidden_size": width, "num_attention_heads": 16})
        assert [note.path for note in float8_notes("trainer.mine.fp8", dims)] == expected


def test_a_model_that_fits_has_no_problem(context: CheckContext) -> None:
    assert found(context) == []
    hub = evolve(context, model=ModelSpec(path="acme/model"), max_sequence_length=10**6)
    assert found(hub) == [], "a model on the Hub is checked once it is loaded"
    assert model_config(hub) is None


def test_float16_would_need_a_loss_scale(context: CheckContext) -> None:
    half = evolve(context, model=ModelSpec(path=context.model.path, dtype="float16"))
    assert found(half) == [("model.dtype", "float16")]


def test_sequences_longer_than_the_model_has_positions(context: CheckContext) -> None:
    longer = evolve(context, max_sequence_length=513)
    (problem,) = trained_model_problems(longer)
    assert problem == too_few_positions(config_file(context), "max_position_embeddings = 512", 513)
    assert (problem.path, problem.expected[:12]) == (str(config_file(context)), "at least 513")


def test_no_stated_limit_is_no_limit(context: CheckContext, tmp_path: Path) -> None:
    assert found(evolve(edited(context, tmp_path, max_position_embeddings=None), max_sequence_length=10**6)) == []


def test_a_text_config_that_is_none_says_no_limit(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 512, "text_config": "none"}
    (problem,) = position_problems(config, tmp_path, 513)
    assert problem.found == "max_position_embeddings = 512"


def test_an_unknown_family_is_the_only_problem_named(context: CheckContext, tmp_path: Path) -> None:
    other = edited(context, tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], max_position_embeddings=8)
    assert found(other) == [(str(tmp_path / "config.json"), "model_type gpt2")]
    assert model_config(other) is None


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_the_core_reports_is_not_read_further(content: str, context: CheckContext, tmp_path: Path) -> None:
    broken = with_config(context, tmp_path, content)
    assert found(broken) == []
    assert model_config(broken) is None


def test_malformed_values_are_not_read_further(context: CheckContext, tmp_path: Path) -> None:
    odd = edited(context, tmp_path, max_position_embeddings="many")
    assert [path for path, _ in found(odd)] == [str(tmp_path / "config.json")]
    assert model_config(odd) is None


def test_the_content_is_under_the_keys_of_most_families(context: CheckContext, tmp_path: Path) -> None:
    content = json.loads(config_file(context).read_text())
    assert model_config(context) == content
    assert model_config(edited(context, tmp_path, hidden_size=48))["hidden_size"] == 48  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "paths"),
    [(None, []), ({"num_experts": 4}, []), ({}, ["rollout.replay_routing"]), ({"num_experts": 0}, ["rollout.replay_routing"])],
)
def test_routing_is_replayed_where_something_routes(model: dict[str, Any] | None, paths: list[str]) -> None:
    assert [problem.path for problem in routing_problems(model, "model")] == paths
