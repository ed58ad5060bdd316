"""What is wrong with `[optimizer]` where tensors have settings of their own: all at once, before anything is allocated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve
from megatron_families import make_own
from megatron_support import make_backend
from multi_token_reference import make_with_head

from rlcore.spi import CheckContext, CloseRequest, ConfigError, LoraSpec, ModelSpec, OptimizerGroup, OptimizerSpec
from rlcore_megatron.checks.check import check
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.optimizer import settings
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model

MUON = OptimizerSpec(name="muon")
Texts = Callable[..., list[str]]
pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3_moe": make_model(root / "qwen3_moe", "qwen3_moe"),
        "deepseek_v3": make_with_head(root / "deepseek_v3", "deepseek_v3"),
        "gpt_oss": make_own(root / "gpt_oss", "gpt_oss"),
        "qwen2_5_vl": make_image_model(root / "qwen2_5_vl", "qwen2_5_vl"),
    }


@pytest.fixture
def texts(models: dict[str, Path]) -> Texts:
    """A function (optimizer, model, context options, section options) -> the problems as they are shown."""

    def find(spec: OptimizerSpec, model: str = "qwen3_moe", context: dict[str, Any] | None = None, **section: Any) -> list[str]:
        options = {"device": "cpu", "world_size": 1, "max_sequence_length": 64, "optimizer": spec, **(context or {})}
        given = CheckContext(model=ModelSpec(path=str(models[model]), dtype="float32"), **options)
        return [str(problem) for problem in check(given, evolve(MegatronConfig(), **section))]

    return find


def grouped(*patterns: str) -> OptimizerSpec:
    return OptimizerSpec(groups=(OptimizerGroup(parameters=patterns, learning_rate=1e-5),))


@pytest.mark.parametrize("spec", [MUON, OptimizerSpec(moments="8bit"), grouped("*.mlp.gate.weight", "lm_head.weight")])
def test_each_is_fine_in_any_layout(spec: OptimizerSpec, texts: Texts) -> None:
    lm_head = evolve(spec, groups=(OptimizerGroup(parameters=("*.mlp.gate.weight",)),)) if spec.groups else spec
    for sizes in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}, {"expert_parallel": 2}):
        assert texts(lm_head, context={"world_size": 4}, **sizes) == []


@pytest.mark.parametrize(
    ("model", "pattern", "section"),
    [
        ("qwen3_moe", "*.experts.3.up_proj.weight", {}),
        ("gpt_oss", "*.experts.gate_up_proj", {}),
        ("deepseek_v3", "model.layers.*.eh_proj.weight", {"mtp": True}),
    ],
)
def test_patterns_are_over_the_names_of_files(model: str, pattern: str, section: dict[str, Any], texts: Texts) -> None:
    assert texts(grouped(pattern), model, **section) == []


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ("qwen3_moe", "*.experts.4.up_proj.weight"),
        ("qwen3_moe", "decoder.layers.*"),
        ("gpt_oss", "*.experts.0.*"),
        ("deepseek_v3", "*.eh_proj.weight"),  # of a head that does not train
        ("deepseek_v3", "*.e_score_correction_bias"),  # which never trains
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(model: str, pattern: str, texts: Texts) -> None:
    (text,) = texts(grouped("*norm.weight", pattern), model)
    assert text.startswith(f"optimizer.groups[0].parameters: found {pattern!r}, ")


@pytest.mark.parametrize(
    ("model", "pattern", "settings", "keys"),
    [
        ("qwen3_moe", "*.q_proj.weight", {"betas": (0.5, 0.6)}, ["betas"]),
        ("gpt_oss", "*.experts.gate_up_proj", {"betas": (0.5, 0.6)}, ["betas"]),
        ("qwen3_moe", "*norm.weight", {"weight_decay": 0.1}, ["weight_decay"]),
        ("qwen3_moe", "model.embed_tokens.weight", {"name": "adamw"}, ["name"]),
        ("qwen2_5_vl", "*visual.*", {"name": "adamw"}, ["name"]),
        ("qwen3_moe", "*.mlp.gate.weight", {"name": "adamw", "betas": (0.5, 0.6), "weight_decay": 0.0}, []),
    ],
)
def test_keys_of_groups_without_effect_are_refused(
    model: str, pattern: str, settings: dict[str, Any], keys: list[str], texts: Texts
) -> None:
    found = texts(evolve(MUON, groups=(OptimizerGroup(parameters=(pattern,), **settings),)), model)
    assert [text.partition(":")[0] for text in found] == [f"optimizer.groups[0].{key}" for key in keys]


def test_with_adapters_patterns_are_over_their_names(texts: Texts) -> None:
    lora = {"lora": LoraSpec(rank=2)}
    assert texts(grouped("*.q_proj.lora_A.weight"), context=lora) == []
    (text,) = texts(grouped("model.embed_tokens.weight"), context=lora)
    assert text.startswith("optimizer.groups[0].parameters: found 'model.embed_tokens.weight'")


def test_the_critics_patterns_are_over_its_own_tensors(texts: Texts, models: dict[str, Path]) -> None:
    critic = {"critic": ModelSpec(path=str(models["qwen3_moe"])), "head": "value"}
    assert texts(grouped("score.weight"), context=critic) == []
    (text,) = texts(grouped("lm_head.weight"), context=critic)
    assert text.startswith("critic.groups[0].parameters: ")


@pytest.mark.parametrize(("freeze", "is_fine"), [("none", True), ("vision", False)])
def test_a_vision_towers_tensors_have_groups_where_they_train(
    freeze: Literal["none", "vision"], is_fine: bool, texts: Texts, models: dict[str, Path]
) -> None:
    spec = grouped("*visual.blocks.*.weight", "*visual.merger.*")
    found = texts(spec, "qwen2_5_vl", freeze=freeze)
    assert [text.split(":")[0] for text in found] == ([] if is_fine else ["optimizer.groups[0].parameters"])
    if is_fine:
        make_backend(models["qwen2_5_vl"], optimizer=spec).close(CloseRequest())
    else:
        with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.parameters"):
            make_backend(models["qwen2_5_vl"], config=MegatronConfig(freeze=freeze), optimizer=spec)


def test_a_frozen_reference_has_no_optimizer(texts: Texts) -> None:
    assert texts(grouped("nothing"), context={"needs_policy": False, "needs_reference": True}) == []


@pytest.mark.parametrize("key", ["decoupled_lr", "apply_wd_to_qk_layernorm", "use_precision_aware_optimizer"])
def test_fields_of_megatrons_own_step_are_refused_beside_another(key: str, texts: Texts) -> None:
    for spec, name in ((MUON, "name"), (OptimizerSpec(moments="8bit"), "moments"), (grouped("*.q_proj.weight"), "groups")):
        found = texts(spec, optimizer={key: 1e-5 if key == "decoupled_lr" else True}, scheduler={"lr_decay_style": "linear"})
        (text,) = (text for text in found if text.startswith(f"trainer.megatron.optimizer.{key}: ") and f"sets {name}," in text)
        assert "Leave it out" in text


def test_one_weight_decay_for_all_is_refused(texts: Texts) -> None:
    decay = {"start_wd": 0.0, "end_wd": 0.1, "wd_incr_style": "linear"}
    found = texts(MUON, scheduler=decay)
    assert [text.split(":")[0] for text in found] == [f"trainer.megatron.scheduler.{key}" for key in decay]
    assert texts(OptimizerSpec(), scheduler=decay) == []


def test_fields_that_no_step_reads_stay(texts: Texts) -> None:
    assert texts(MUON, optimizer={"log_num_zeros_in_grad": True}) == []


def test_moments_in_8_bits_need_torchao(texts: Texts, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: None)
    (text,) = texts(OptimizerSpec(moments="8bit"))
    assert text.startswith("optimizer.moments: ")
    assert "pip install 'rlcore-megatron[8bit]'" in text
    assert texts(MUON) == []
    critic = {"critic": ModelSpec(path=str(models["qwen3_moe"])), "head": "value"}
    (text,) = texts(OptimizerSpec(moments="8bit"), context=critic)
    assert text.startswith("critic.moments: ")


def test_a_model_that_check_did_not_see_is_refused_before_it_is_built(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.parameters"):
        make_backend(models["qwen3_moe"], optimizer=grouped("nothing"))
