"""Model, lengths, layout, adapters and machines of NeMo-RL's recipes."""

from pathlib import Path

import pytest

from rlcore.spi import ConfigError
from rlcore_import.nemo_rl_policy import TEXTS_ALONE

from .nemo_recipes import grpo, reported

TOKENIZER = "policy.tokenizer.chat_template"


@pytest.mark.parametrize(
    ("template", "expected"),
    [("default", None), ("null", TEXTS_ALONE), ("'{{ messages }}'", "{{ messages }}"), ("path/chat.jinja", None)],
)
def test_the_chat_template_is_that_of_there(tmp_path: Path, template: str, expected: str | None) -> None:
    found = grpo(tmp_path, f"{TOKENIZER}={template}")
    assert found.values.get("model.chat_template") == expected
    assert (TOKENIZER in reported(found)) is template.endswith(".jinja")


def test_without_a_template_it_is_the_tokenizers_own(tmp_path: Path) -> None:
    found = grpo(tmp_path, f"~{TOKENIZER}", "policy.tokenizer.chat_template_kwargs={enable_thinking: false, other: null}")
    assert "model.chat_template" not in found.values
    assert found.values["model.chat_template_kwargs.enable_thinking"] is False
    assert "model.chat_template_kwargs.other" not in found.values


@pytest.mark.parametrize(
    ("prompts", "answers", "expected"),
    [(256, 1024, (256, 768)), (1024, 600, (424, 600)), (1024, 1024, (256, 768)), (200, 300, (200, 300))],
)
def test_prompt_and_answer_have_limits_of_their_own(
    tmp_path: Path, prompts: int, answers: int, expected: tuple[int, int]
) -> None:
    found = grpo(tmp_path, f"data.max_input_seq_length={prompts}", f"policy.generation.max_new_tokens={answers}")
    assert (found.values["rollout.max_prompt_tokens"], found.values["rollout.max_response_tokens"]) == expected
    assert ("policy.max_total_sequence_length" in reported(found)) is (prompts + answers > 1024)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("policy.tokenizer.name=acme/other", "policy.tokenizer.name"),
        ("policy.precision=float16", "policy.precision"),
        ("policy.pretrained_checkpoint={path: x, format: megatron_lm}", "policy.pretrained_checkpoint"),
        ("checkpointing={enabled: false, pretrained_checkpoint: {path: x}}", "checkpointing.pretrained_checkpoint"),
        ("policy.hf_config_overrides={rope_scaling: {factor: 2}}", "policy.hf_config_overrides.rope_scaling.factor"),
        (
            "policy.dtensor_cfg.automodel_kwargs={freeze_config: {freeze_vision_tower: true}}",
            "policy.dtensor_cfg.automodel_kwargs.freeze_config.freeze_vision_tower",
        ),
        ("policy.dtensor_cfg.lora_cfg={enabled: true, lora_A_init: xavier}", "policy.dtensor_cfg.lora_cfg.lora_A_init"),
        (
            "policy.dtensor_cfg.lora_cfg={enabled: true, dropout: 0.1, dropout_position: post}",
            "policy.dtensor_cfg.lora_cfg.dropout_position",
        ),
        ("policy.megatron_cfg={enabled: true, freeze_moe_router: true}", "policy.megatron_cfg.freeze_moe_router"),
        ("policy.megatron_cfg={enabled: false, brand_new: 1}", "policy.megatron_cfg.brand_new"),
        ("policy.dtensor_cfg={enabled: true, env_vars: {X: 1}}", "policy.dtensor_cfg.env_vars.X"),
    ],
)
def test_what_differs_is_reported(tmp_path: Path, override: str, key: str) -> None:
    assert key in reported(grpo(tmp_path, override))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("policy.dtensor_cfg.lora_cfg={enabled: true, lora_A_init: uniform}", "policy.dtensor_cfg.lora_cfg.lora_A_init"),
        ("policy.dtensor_cfg.lora_cfg={enabled: true, dropout: 0.0}", "policy.dtensor_cfg.lora_cfg.dropout_position"),
        ("policy.megatron_cfg={enabled: false, freeze_moe_router: true}", "policy.megatron_cfg.freeze_moe_router"),
        ("policy.hf_config_overrides={router_aux_loss_coef: 0.0}", "policy.hf_config_overrides.router_aux_loss_coef"),
    ],
)
def test_what_is_off_is_not(tmp_path: Path, override: str, key: str) -> None:
    assert key not in reported(grpo(tmp_path, override))


@pytest.mark.parametrize("override", ["policy.model_name=null", "policy.model_name=???", "policy.tokenizer.chat_template=[1]"])
def test_a_model_has_a_name(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        grpo(tmp_path, override)


APART = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: %s, num_nodes: %s}}"
MEGATRON = "policy.megatron_cfg={enabled: true, tensor_model_parallel_size: %d}"


@pytest.mark.parametrize(
    ("nodes", "resources", "tensor", "expected"),
    [
        (1, ("4", "null"), 2, {"cluster.generator_gpus_per_node": 4, "cluster.placement": "separate"}),
        (4, ("8", "1"), 2, {"cluster.generator_gpus_per_node": 2, "cluster.nodes": 4}),
        (3, ("8", "1"), 16, {"cluster.nodes": 2, "cluster.placement": None, "cluster.address": "auto"}),
    ],
)
def test_the_machines_bear_the_layout(
    tmp_path: Path, nodes: int, resources: tuple[str, str], tensor: int, expected: dict[str, object]
) -> None:
    found = grpo(tmp_path, f"cluster.num_nodes={nodes}", APART % resources, MEGATRON % tensor)
    assert {key: found.values.get(key) for key in expected} == expected
    keys = reported(found, changing=False)
    assert any(key.startswith("policy.generation.colocated.resources") for key in keys) is (nodes > 1)


def test_a_layout_that_the_machines_which_train_do_not_bear_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size: found 16; expected .* 8 ranks"):
        grpo(tmp_path, "cluster.num_nodes=2", APART % ("8", "1"), MEGATRON % 16)
