"""The settings of tensors by `[optimizer]`, and which patterns are refused."""

from types import SimpleNamespace

import pytest
from attrs import evolve

from rlcore.spi import OptimizerGroup, OptimizerSpec
from rlcore_torchkit.optimizer import settings
from rlcore_torchkit.optimizer.settings import (
    effect_problems,
    group_problems,
    is_flat_stack,
    missing_torchao,
    tensor_settings,
)

MUON = OptimizerSpec(name="muon", learning_rate=1e-3, weight_decay=0.1, moments="8bit")
LAYER = "model.layers.3."


@pytest.mark.parametrize(
    ("name", "shape", "in_layers", "method"),
    [
        (f"{LAYER}self_attn.q_proj.weight", (64, 64), True, "muon"),
        (f"{LAYER}mlp.experts.7.down_proj.weight", (64, 32), True, "muon"),
        (f"{LAYER}mlp.experts.gate_up_proj", (8, 64, 64), True, "muon"),
        (f"{LAYER}mlp.gate.weight", (8, 64), True, "muon"),
        (f"{LAYER}mlp.experts.gate_up_proj_bias", (8, 64), True, "adamw"),
        (f"{LAYER}mlp.shared_expert_gate.weight", (1, 64), True, "adamw"),
        (f"{LAYER}self_attn.sinks", (8,), True, "adamw"),
        (f"{LAYER}mixer.conv1d.weight", (64, 1, 4), True, "adamw"),
        (f"{LAYER}mixer.A_log", (64, 16), True, "adamw"),
        (f"{LAYER}conv.in_proj.weight", (192, 64), True, "muon"),
        (f"{LAYER}conv.conv.weight", (64, 1, 3), True, "adamw"),
        (f"{LAYER}linear_attn.q_conv1d.weight", (64, 4), True, "adamw"),
        (f"{LAYER}short_conv.weight", (64, 64, 4), True, "adamw"),
        (f"{LAYER}block_sparse_moe.input_linear.weight", (8, 64, 32), True, "muon"),
        (f"{LAYER}mlp.output_linear.weight", (8, 64, 32), True, "muon"),
        (f"{LAYER}mlp.output_linear.bias", (8, 64, 32), True, "adamw"),
        (f"{LAYER}shared_head.head.weight", (100, 64), True, "adamw"),
        (f"{LAYER}input_layernorm.weight", (64,), True, "adamw"),
        ("model.embed_tokens.weight", (100, 64), False, "adamw"),
        ("visual.blocks.0.attn.qkv.weight", (192, 64), False, "adamw"),
    ],
)
def test_muon_has_the_matrices_of_layers(name, shape, in_layers, method):
    assert tensor_settings(MUON, name, shape, in_layers=in_layers).method == method


@pytest.mark.parametrize(
    ("name", "shape", "is_flat"),
    [
        (f"{LAYER}ffn.experts.mlp.w1", (256, 64), True),
        (f"{LAYER}ffn.experts.mlp.w1", (8, 32, 64), False),
        (f"{LAYER}mlp.experts.gate_up_proj_bias", (8, 64), False),
        (f"{LAYER}mlp.experts.7.w1", (32, 64), False),
        (f"{LAYER}self_attention.experts.router.layer.weight", (8, 64), False),
    ],
)
def test_stack_that_files_hold_as_one_matrix_is_known_by_its_name(name, shape, is_flat):
    assert is_flat_stack(name, shape) is is_flat


@pytest.mark.parametrize(
    ("shape", "eight_bit", "decay"), [((64, 64), True, 0.1), ((63, 65), False, 0.1), ((4096,), False, 0.0)]
)
def test_large_matrices_of_adamw_have_moments_in_8_bits(shape, eight_bit, decay):
    found = tensor_settings(MUON, "lm_head.weight", shape, in_layers=False)
    assert (found.eight_bit, found.weight_decay) == (eight_bit, decay)


def test_first_group_that_matches_counts():
    spec = evolve(
        MUON,
        groups=(
            OptimizerGroup(parameters=("none", "*.q_proj.weight"), learning_rate=0.5),
            OptimizerGroup(parameters=("*.layers.3.*",), name="adamw", betas=(0.5, 0.6), weight_decay=0.0),
        ),
    )
    first = tensor_settings(spec, f"{LAYER}self_attn.q_proj.weight", (64, 64), in_layers=True)
    assert (first.method, first.learning_rate, first.weight_decay, first.betas) == ("muon", 0.5, 0.1, (0.9, 0.999))
    second = tensor_settings(spec, f"{LAYER}self_attn.k_proj.weight", (64, 64), in_layers=True)
    assert (second.method, second.learning_rate, second.weight_decay, second.betas) == ("adamw", 1e-3, 0.0, (0.5, 0.6))


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        ([("a.*",), ("b.bias",)], []),
        ([("a.*", "c.*")], ["optimizer.groups[0].parameters"]),
        ([("A.*",)], ["optimizer.groups[0].parameters"]),
        ([("a.*",), ("a.weight",)], ["optimizer.groups[1].parameters"]),
        ([("x",), ("y",)], ["optimizer.groups[0].parameters", "optimizer.groups[1].parameters"]),
    ],
)
def test_groups_without_a_tensor_are_refused(patterns, paths):
    spec = OptimizerSpec(groups=tuple(OptimizerGroup(parameters=each, learning_rate=1.0) for each in patterns))
    assert [problem.path for problem in group_problems(spec, ["a.weight", "b.weight", "b.bias"])] == paths


@pytest.mark.parametrize(
    ("method", "patterns", "settings", "keys"),
    [
        ("muon", ("*.q_proj.weight",), {"betas": (0.5, 0.6)}, ["betas"]),
        ("muon", ("*.q_proj.weight", "*norm*"), {"betas": (0.5, 0.6)}, []),
        ("adamw", ("*.q_proj.weight",), {"betas": (0.5, 0.6)}, []),
        ("adamw", ("*norm*",), {"weight_decay": 0.1}, ["weight_decay"]),
        ("adamw", ("*norm*", "lm_head.*"), {"weight_decay": 0.1}, []),
        ("muon", ("lm_head.*", "*norm*"), {"name": "adamw"}, ["name"]),
        ("muon", ("*.q_proj.weight",), {"name": "adamw", "betas": (0.5, 0.6)}, []),
        ("adamw", ("lm_head.*",), {"name": "adamw"}, []),  # a critic's, which has the policy's groups
        ("muon", ("*norm*",), {"name": "adamw", "weight_decay": 0.0}, ["weight_decay", "name"]),
    ],
)
def test_keys_of_groups_that_change_nothing_are_refused(method, patterns, settings, keys):
    tensors = {
        f"{LAYER}self_attn.q_proj.weight": ((64, 64), True),
        f"{LAYER}input_layernorm.weight": ((64,), True),
        "lm_head.weight": ((100, 64), False),
    }
    spec = OptimizerSpec(name=method, groups=(OptimizerGroup(parameters=patterns, **settings),))
    assert [problem.path for problem in effect_problems(spec, tensors)] == [f"optimizer.groups[0].{key}" for key in keys]


def test_missing_torchao_is_refused_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    (problem,) = missing_torchao(MUON, "rlcore-mine[8bit]")
    assert "rlcore-mine[8bit]" in problem.remedy
    assert list(missing_torchao(OptimizerSpec(), "rlcore-mine[8bit]")) == []


def test_torchao_without_the_codes_is_refused(monkeypatch, tmp_path):
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(settings, "find_spec", lambda name: found)
    (problem,) = missing_torchao(MUON, "rlcore-mine[8bit]")
    assert "quant_utils" in problem.found
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "quant_utils.py").touch()
    assert list(missing_torchao(MUON, "rlcore-mine[8bit]")) == []
