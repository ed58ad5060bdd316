"""Settings of parameters that hold several tensors of a checkpoint, and where its matrices lie in them."""

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, DbrxConfig

from rlcore.spi import ConfigError, OptimizerGroup, OptimizerSpec
from rlcore_fsdp2.export import Exporter
from rlcore_fsdp2.trained_parameters import Matrix, settings_problems, trained_parameters

MUON = OptimizerSpec(name="muon")


def group(*patterns, **settings):
    return evolve(MUON, groups=(OptimizerGroup(parameters=patterns, **settings),))


@pytest.fixture(scope="module")
def found(model_directory):
    """A function of a specification: the parameters of a tiny Qwen3-MoE by name."""
    model = AutoModelForCausalLM.from_pretrained(model_directory("qwen3_moe", False))
    exported = Exporter(model).exported
    return lambda spec: {each.name: each for each in trained_parameters(model, exported, spec)}


def test_matrices_of_stacks_are_those_of_the_checkpoint(found):
    layer = "model.layers.1."
    parameters = found(MUON)
    assert parameters[f"{layer}mlp.experts.gate_up_proj"].matrices == (
        Matrix(rows=(0, 32), columns=(0, 32), shape=(32, 32)),
        Matrix(rows=(32, 64), columns=(0, 32), shape=(32, 32)),
    )
    assert parameters[f"{layer}mlp.experts.down_proj"].matrices == (Matrix(rows=(0, 32), columns=(0, 32), shape=(32, 32)),)
    assert parameters[f"{layer}self_attn.k_proj.weight"].matrices == (Matrix(rows=(0, 16), columns=(0, 32), shape=(16, 32)),)
    assert {name for name, each in parameters.items() if not each.matrices} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        *(f"model.layers.{n}.{name}_layernorm.weight" for n in range(2) for name in ("input", "post_attention")),
        *(f"model.layers.{n}.self_attn.{name}_norm.weight" for n in range(2) for name in "qk"),
    }


def test_group_of_all_experts_of_a_stack_is_that_of_the_stack(found):
    parameters = found(group("*.experts.*.gate_proj.weight", "*.experts.*.up_proj.weight", learning_rate=0.5))
    assert parameters["model.layers.0.mlp.experts.gate_up_proj"].settings.learning_rate == 0.5
    assert parameters["model.layers.0.mlp.experts.down_proj"].settings.learning_rate == MUON.learning_rate


@pytest.mark.parametrize(
    ("patterns", "settings", "num_problems"),
    [
        (("*.experts.*.gate_proj.weight",), {"name": "adamw"}, 2),
        (("*.layers.0.mlp.experts.2.*",), {"learning_rate": 0.5}, 2),
        (("*.nothing",), {"learning_rate": 0.5}, 1),
    ],
)
def test_parts_of_a_stack_are_refused(patterns, settings, num_problems, found):
    with pytest.raises(ConfigError) as caught:
        found(group(*patterns, **settings))
    assert len(caught.value.problems) == num_problems
    assert {problem.path.partition("[")[0] for problem in caught.value.problems} == {"optimizer.groups"}


def test_experts_that_files_hold_as_one_matrix_have_no_muon():
    experts = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0}
    config = DbrxConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, ffn_config=experts, attn_config=attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    exported = Exporter(model).exported
    problems = list(settings_problems(model, exported, MUON, "critic"))
    assert {problem.path for problem in problems} == {"critic.name"}
    assert len(problems) == 2 * 3
    assert list(settings_problems(model, exported, group("*.experts.mlp.*", name="adamw"), "critic")) == []
