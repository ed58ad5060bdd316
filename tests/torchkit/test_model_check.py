"""Faults of a recipe's model are found, for trainers and generators alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from rlcore.spi import CheckContext, ModelSpec
from rlcore.spi.weights import VALUE_HEAD_WEIGHT, Head
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.model_check import (
    config_file,
    float8_notes,
    model_config,
    position_problems,
    reference_problems,
    routing_problems,
    too_few_positions,
    trained_model_problems,
)
from rlcore_torchkit.testing.image_models import make_image_model


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


UP = "model.layers.0.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("removed", "added", "config", "expected"),
    [
        ([], {}, {}, []),
        ([], {"lm_head.weight": None, "model.layers.0.self_attn.rotary_emb.inv_freq": [4], "mtp.norm.weight": [4]}, {}, []),
        ([UP], {}, {}, [f"no {UP} in the weights"]),
        ([], {UP: [96, 31]}, {}, [f"{UP} of shape [96, 31]"]),
        ([], {BIAS: [32]}, {}, [f"{BIAS} in the weights"]),
        ([], {BIAS: [32]}, {"attention_bias": True}, ["k_proj.bias, model.layers.0.self_attn.o_proj.bias"]),
        (
            [],
            {},
            {"intermediate_size": 95},
            ["down_proj.weight of shape", "gate_proj.weight of shape", "up_proj.weight of shape"],
        ),
        ([], {}, {"num_key_value_heads": 1}, ["k_proj.weight of shape", "v_proj.weight of shape", "k_proj.weight of shape"]),
    ],
)
@pytest.mark.parametrize("has_prefix", [True, False])
def test_tensors_that_config_json_does_not_know_or_misses(
    context: CheckContext,
    tmp_path: Path,
    removed: list[str],
    added: dict[str, list[int] | None],
    config: dict[str, Any],
    expected: list[str],
    has_prefix: bool,
) -> None:
    tensors = load_file(config_file(context).parent / "model.safetensors")
    for name in removed:
        del tensors[name]
    for name, shape in added.items():
        tensors[name] = tensors["model.embed_tokens.weight"].clone() if shape is None else torch.zeros(shape)
    own = {name if has_prefix else name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(own, tmp_path / "model.safetensors")
    problems = [problem for _, problem in found(edited(context, tmp_path, layer_types=None, **config))]
    assert len(problems) == len(expected)
    for part, problem in zip(expected, problems, strict=True):
        assert part.removeprefix("no ").removeprefix("model.") in problem


def test_what_the_core_reports_is_not_said_twice(context: CheckContext, tmp_path: Path) -> None:
    shutil.copy(config_file(context).parent / "model.safetensors", tmp_path)
    assert found(edited(context, tmp_path, num_hidden_layers=1, layer_types=None)) == []


@pytest.mark.parametrize("head", ["tokens", "value"])
def test_a_head_of_values_may_be_missing(context: CheckContext, tmp_path: Path, head: Head) -> None:
    tensors = load_file(config_file(context).parent / "model.safetensors")
    save_file({**tensors, VALUE_HEAD_WEIGHT: torch.zeros(1, 32)}, tmp_path / "model.safetensors")
    assert found(evolve(context, head="value")) == []
    problems = found(evolve(edited(context, tmp_path), head=head))
    assert [problem for _, problem in problems] == ([] if head == "value" else ["score.weight in the weights"])


@pytest.mark.parametrize("place", ["model", "reference"])
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("content", [None, '{"image_processor_type": "CLIPImageProcessor"}', "whole"])
def test_an_image_processor_has_to_load(
    content: str | None, trusted: bool, place: str, context: CheckContext, tmp_path: Path
) -> None:
    """Of a model whose code is trusted nothing is loaded."""
    whole, other = make_image_model(tmp_path / "whole", "qwen3_vl"), make_image_model(tmp_path / "other", "qwen3_vl")
    file = other / "preprocessor_config.json"
    if content is None:
        file.unlink()
    elif content != "whole":
        file.write_text(content)
    spec = ModelSpec(path=str(other), trust_remote_code=trusted)
    if place == "model":
        problems = list(trained_model_problems(evolve(context, model=spec), any_decoder=True))
    else:
        own = evolve(context, model=ModelSpec(path=str(whole)), reference=spec)
        problems = list(reference_problems(own, lambda _: (), any_decoder=True))
    expected = [] if content == "whole" or trusted else [str(other)]
    assert [problem.path for problem in problems] == expected
    assert all("preprocessor_config.json" in problem.expected for problem in problems)


PROCESSOR = "preprocessor_config.json"
FETCHED = {
    "all files": ((PROCESSOR,), (), False, []),
    "not asked for yet": ((), (), False, []),
    "not asked for yet, and offline": ((), (), True, ["acme/images"]),
    "the Hub has none": ((), (PROCESSOR, "processor_config.json"), False, ["acme/images"]),
    "the Hub may have one": ((), (PROCESSOR,), False, []),
}
"""The processor's files that were fetched, those that the Hub has not, whether it may be asked, and the problems' paths."""


@pytest.mark.parametrize(("fetched", "absent", "offline", "paths"), FETCHED.values(), ids=FETCHED)
def test_a_fetched_model_of_images_has_an_image_processor(
    context: CheckContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fetched: tuple[str, ...],
    absent: tuple[str, ...],
    offline: bool,
    paths: list[str],
) -> None:
    """In the Hub's cache, with which nothing is fetched."""
    repository = tmp_path / "models--acme--images"
    snapshot = repository / "snapshots" / "0"
    whole = make_image_model(tmp_path / "whole", "qwen3_vl")
    for name in ("config.json", *fetched):
        snapshot.mkdir(parents=True, exist_ok=True)
        shutil.copy(whole / name, snapshot / name)
    for name in absent:
        (repository / ".no_exist" / "0").mkdir(parents=True, exist_ok=True)
        (repository / ".no_exist" / "0" / name).touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("socket.getaddrinfo", None)
    hub = evolve(context, model=ModelSpec(path="acme/images"))
    problems = list(trained_model_problems(hub, any_decoder=True))
    assert [problem.path for problem in problems] == paths
    assert all(PROCESSOR in problem.expected for problem in problems)
    trusted = evolve(hub, model=evolve(hub.model, trust_remote_code=True))
    assert list(trained_model_problems(trusted, any_decoder=True)) == []


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
