"""Families that Megatron alone computes: what their config.json says, and what of it is refused; test_layout shows the rest."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from attrs import evolve
from lora_support import linear_names
from megatron_families import FAMILIES, WITHOUT_ADAPTERS, make_own
from megatron_image_cases import FAMILIES as IMAGE_FAMILIES
from megatron_support import make_backend
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import CheckContext, ConfigError, LoraSpec, ModelError, ModelSpec
from rlcore_megatron.checks.check import check
from rlcore_megatron.families.models import FAMILIES as REGISTERED
from rlcore_megatron.families.models import architecture_of, dims_of, find_family, load_config, standard_config
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.layouts.auto_layout import choose
from rlcore_megatron.layouts.memory import Parameters, Workload, estimate
from rlcore_megatron.layouts.stages import layers_of_stages
from rlcore_megatron.setup import requirements
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.adapters.lora_targets import linear_layers
from rlcore_torchkit.architectures.decoders import described_family

ONE = MegatronConfig(tensor_parallel=1, expert_parallel=1, context_parallel=1, pipeline_parallel=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own-families")
    for name in FAMILIES:
        make_own(root / name, name)
    return root


def changed(models: Path, tmp_path: Path, name: str, **values: object) -> Path:
    """A directory with the family's config.json, and these values in it."""
    content = json.loads((models / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | values))
    return tmp_path


def found(directory: Path, config: MegatronConfig = ONE, **options: object) -> list[str]:
    spec = ModelSpec(path=str(directory))
    context = CheckContext(model=spec, **{"world_size": 1, "device": "cpu", "max_sequence_length": 16, **options})
    return [f"{problem.path.rpartition('/')[2]}: {problem.found}" for problem in check(context, config)]


def test_all_that_are_registered_are_tried() -> None:
    assert REGISTERED.keys() == FAMILIES.keys() | set(IMAGE_FAMILIES), "test_images has those of images"


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_wrong_with_a_family_as_it_is(models: Path, name: str) -> None:
    assert found(models / name) == []
    assert architecture_of(load_config(ModelSpec(path=str(models / name)))).model_type == name


@pytest.mark.parametrize("name", FAMILIES)
def test_others_go_on_with_transformers_own_class(models: Path, name: str) -> None:
    content = json.loads((models / name / "config.json").read_text())
    assert described_family(content) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_mean_what_transformers_takes_for_them(name: str) -> None:
    """Also where config.json says as little as files on the Hub do."""
    full = AutoConfig.for_model(name).to_dict()
    essential = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    short = {key: full[key] for key in essential if key in full}
    families = [find_family(content, "config.json") for content in (full, short)]
    same = ("has_qkv_biases", "has_qk_norms", "transformer", "derived", "windows", "score_width", "score_cap", "logit_cap")
    for key in (*same, "local_theta"):
        assert getattr(families[0], key) == getattr(families[1], key), key
    complete, completed = (family.standard(content) for family, content in zip(families, (full, short), strict=True))
    names = {**families[0].defaults, **families[0].derived}
    assert {key: complete[key] for key in names} == {key: completed[key] for key in names}


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_estimated_of_all_parameters(models: Path, name: str) -> None:
    """But for norms and biases."""
    model = AutoModelForCausalLM.from_pretrained(models / name)
    matrices = [value for name, value in model.named_parameters() if value.ndim > 1 and not name.endswith("bias")]
    expected = sum(value.numel() for value in matrices)
    dims = dims_of(model.config)
    assert Parameters.of(dims, ONE).total == expected
    # Two ranks that divide everything hold routers and narrow projections twice.
    kinds = ("gate.weight", "router.weight", "q_a_proj.weight", "mqa.weight", "wq_b.weight", "wk.weight", "weights_proj.weight")
    twice = [tensor for key, tensor in model.named_parameters() if key.endswith(kinds)]
    halves = Parameters.of(dims, evolve(ONE, tensor_parallel=2, expert_parallel=2)).total
    assert 2 * halves == expected + sum(tensor.numel() for tensor in twice)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("glm4_moe", "norm_topk_prob", False),
        ("glm4_moe", "n_group", 2),
        ("glm4_moe", "hidden_act", "gelu"),
        ("glm4_moe", "mlp_bias", True),
        ("glm4_moe", "num_experts_per_tok", 1),
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "hidden_act", "gelu"),
        ("gpt_oss", "attention_bias", False),
        ("gemma2", "attention_bias", True),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("qwen3_next", "attention_bias", True),
        ("qwen3_next", "hidden_act", "gelu"),
        ("qwen3_5_text", "linear_num_value_heads", 6),
        ("minimax_m2", "router_jitter_noise", 0.1),
        ("minimax_m2", "num_experts_per_tok", 1),
    ],
)
def test_what_megatron_cannot_compute_is_named(models: Path, tmp_path: Path, name: str, key: str, value: object) -> None:
    assert found(changed(models, tmp_path, name, **{key: value})) == [f"config.json: {key} = {json.dumps(value)}"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("glm4_moe", "first_k_dense_replace", "one"),
        ("glm4_moe", "n_shared_experts", -1),
        ("glm4_moe", "use_qk_norm", 1),
        ("glm4_moe", "routed_scaling_factor", "x"),
        ("glm4_moe", "moe_intermediate_size", []),
        ("deepseek_v3", "kv_lora_rank", 0),
        ("deepseek_v3", "q_lora_rank", "wide"),
        ("deepseek_v3", "v_head_dim", 1.5),
        ("deepseek_v3", "n_group", -1),
        ("gpt_oss", "sliding_window", "wide"),
        ("gpt_oss", "swiglu_limit", [7]),
        ("gpt_oss", "layer_types", 3),
        ("gemma2", "final_logit_softcapping", 0),
        ("gemma2", "attn_logit_softcapping", "high"),
        ("gemma2", "sliding_window", -1),
        ("gemma3_text", "query_pre_attn_scalar", "wide"),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("qwen3_next", "linear_num_key_heads", 0),
        ("qwen3_5_moe_text", "layer_types", 3),
        ("glm_moe_dsa", "index_topk", 0),
        ("deepseek_v32", "index_head_dim", "wide"),
    ],
)
def test_malformed_values_are_named(models: Path, tmp_path: Path, name: str, key: str, value: object) -> None:
    (problem,) = found(changed(models, tmp_path, name, **{key: value}))
    assert problem.startswith(f"config.json: {key} = ")


def test_kinds_of_rotary_embeddings_that_scale_scores_are_refused(models: Path, tmp_path: Path) -> None:
    directory = changed(models, tmp_path, "glm4_moe", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})
    assert found(directory) == ['config.json: rope_type = "yarn"']


def test_layers_of_another_kind_and_fewer_than_there_are_layers_are_named(models: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "chunked_attention", "full_attention"]
    assert found(changed(models, tmp_path, "gpt_oss", layer_types=kinds)) == ["config.json: layers of chunked_attention"]
    (problem,) = found(changed(models, tmp_path, "gpt_oss", layer_types=kinds[:2]))
    assert problem == "config.json: layer_types of 2 layers"


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_older_names_of_layers_are_read(models: Path, tmp_path: Path, name: str, kind: str) -> None:
    """The second is that of transformers 5.17 and of files that it wrote."""
    shutil.copytree(models / name, tmp_path, dirs_exist_ok=True)
    assert found(changed(models, tmp_path, name, layer_types=[kind] * 4)) == []


def test_rotations_of_gemma_3_that_megatron_would_take_otherwise_are_named(models: Path, tmp_path: Path) -> None:
    linear, yarn = ({"rope_type": kind, "factor": 2.0, "rope_theta": 1e4} for kind in ("linear", "yarn"))
    ropes = {"full_attention": yarn, "sliding_attention": linear}
    assert found(changed(models, tmp_path, "gemma3_text", rope_parameters=ropes)) == [
        'config.json: rope_type = "linear" of sliding_attention',
        'config.json: rope_type = "yarn"',
    ]
    (problem,) = found(changed(models, tmp_path, "gemma3_text", rope_parameters={"full_attention": 3}))
    assert problem.startswith("config.json: rope_parameters.full_attention = 3")


def test_gemma_2_without_caps_uses_kernels(models: Path, tmp_path: Path) -> None:
    """null is no cap; a config.json without the keys has Gemma 2's."""
    content = json.loads((models / "gemma2" / "config.json").read_text())
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert found(changed(models, tmp_path, "gemma2", **caps)) == []
    for values, expected in ((content | caps, (None, None)), ({"model_type": "gemma2"}, (50.0, 30.0))):
        family = find_family(values, "config.json")
        assert (family.score_cap, family.logit_cap) == expected
        assert family.stores_scores == (expected[0] is not None)


def test_experts_with_biases_are_on_one_rank_each(models: Path) -> None:
    config = MegatronConfig(tensor_parallel=2, expert_tensor_parallel=2)
    path = "trainer.megatron.expert_tensor_parallel"
    assert f"{path}: 2, with model_type gpt_oss" in found(models / "gpt_oss", config, world_size=2)


@pytest.mark.parametrize("engine", [True, None])
def test_grouped_experts_with_biases_are_refused(models: Path, engine: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's leave the biases of the first layer out, and were 0.45 nats off on a GPU."""
    monkeypatch.setattr(requirements, "transformer_engine_version", lambda: Version("2.12.0"))
    config, place = evolve(ONE, transformer_engine=engine), {"device": "cuda"}
    given = "true" if engine else "nothing, which takes the one installed"
    wanted = f"trainer.megatron.transformer_engine: {given}, with model_type gpt_oss"
    spec = ModelSpec(path=str(models / "gpt_oss"), dtype="bfloat16")
    context = CheckContext(model=spec, world_size=1, max_sequence_length=16, **place)
    assert wanted in [f"{problem.path}: {problem.found}" for problem in check(context, config)]
    off = check(context, evolve(config, transformer_engine=False))
    assert not any(problem.path.endswith("transformer_engine") for problem in off)
    other = CheckContext(
        model=evolve(spec, path=str(models / "glm4_moe")),
        reference=spec,
        needs_reference=True,
        world_size=1,
        max_sequence_length=16,
        **place,
    )
    assert wanted in [f"{problem.path}: {problem.found}" for problem in check(other, config)]


def test_a_model_of_values_is_refused(models: Path) -> None:
    (problem,) = found(models / "glm4_moe", head="value")
    assert "model_type glm4_moe" in problem


def test_losses_of_routers_that_are_balanced_by_biases_are_refused(models: Path) -> None:
    table = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    config = MegatronConfig(transformer=table)
    assert found(models / "glm4_moe", config) == [
        "trainer.megatron.transformer.moe_aux_loss_coeff: 0.1, with model_type glm4_moe"
    ]


def test_tensor_ranks_divide_the_shared_expert(models: Path, tmp_path: Path) -> None:
    directory = changed(models, tmp_path, "glm4_moe", n_shared_experts=1, moe_intermediate_size=17)
    config = MegatronConfig(tensor_parallel=2, expert_parallel=1, context_parallel=1, pipeline_parallel=1)
    assert any("shared expert" in problem for problem in found(directory, config, world_size=2))


def test_a_backend_refuses_what_check_does(models: Path) -> None:
    config = load_config(ModelSpec(path=str(models / "glm4_moe")))
    for change, head in (({}, "value"), ({"norm_topk_prob": False}, "tokens")):
        config.update(change)
        with pytest.raises(ModelError):
            Names.of(config, head)


def test_a_backend_refuses_options_that_check_could_not_see(models: Path) -> None:
    """Of a model on the Hub, whose config.json is read by the ranks alone."""
    table = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    for name, config in (("gpt_oss", evolve(ONE, expert_tensor_parallel=2)), ("glm4_moe", evolve(ONE, transformer=table))):
        with pytest.raises(ConfigError, match=f"with model_type {name}"):
            make_backend(models / name, config=config, world_size=2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2, with num_attention_heads = 4"),
        ({"topk_group": 1}, "num_experts_per_tok = 4, with topk_group = 1 of n_group = 4"),
        ({"n_group": 3}, "n_group = 3 and topk_group = 2, with n_routed_experts = 8"),
        ({"topk_group": 5}, "n_group = 4 and topk_group = 5, with n_routed_experts = 8"),
        ({"num_experts_per_tok": 1, "topk_group": 4}, "num_experts_per_tok = 1"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 'rope_type = "yarn" without a factor'),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, 'rope_type = "longrope"'),
    ],
    ids=str,
)
def test_heads_groups_and_rotation_that_megatron_would_take_otherwise(
    models: Path, tmp_path: Path, values: dict[str, object], expected: str
) -> None:
    assert found(changed(models, tmp_path, "deepseek_v3", **values)) == [f"config.json: {expected}"]


@pytest.mark.parametrize(
    "values", [{"topk_group": 4}, {"q_lora_rank": None}, {"rope_parameters": None}, {"n_group": 1, "topk_group": 1}], ids=str
)
def test_variants_that_megatron_computes(models: Path, tmp_path: Path, values: dict[str, object]) -> None:
    assert found(changed(models, tmp_path, "deepseek_v3", **values)) == []


def test_malformed_scales_of_scores_are_named(models: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": "x"}
    (problem,) = found(changed(models, tmp_path, "deepseek_v3", rope_parameters=rope))
    assert problem.startswith("config.json: rope_parameters.mscale = ")


def test_quantised_weights_are_refused(models: Path, tmp_path: Path) -> None:
    """As the Hub has DeepSeek-V3."""
    directory = changed(
        models, tmp_path, "deepseek_v3", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    assert found(directory) == ["config.json: weights quantised by fp8, as quantization_config says"]


@pytest.mark.parametrize(
    ("options", "place", "expected"),
    [
        (
            {"tensor_parallel": 4},
            {"world_size": 4},
            [
                "tensor_parallel 4 for 102 tokens of the vocabulary",
                "tensor_parallel 4 for 2 key heads",
            ],
        ),
        (
            {"tensor_parallel": 2, "context_parallel": 4},
            {"world_size": 8},
            [
                "tensor_parallel 2 x context_parallel 4 for 4 key heads of gated delta nets",
                "context_parallel 4 x tensor_parallel 2 for 4 attention heads",
            ],
        ),
        ({"pretrained_checkpoint": "/nowhere"}, {}, ["/nowhere, with model_type qwen3_5_text", "/nowhere, which is not there"]),
        ({}, {"lora": LoraSpec(rank=4)}, ["the section, with model_type qwen3_5_text"]),
        (
            {"transformer_engine": False},
            {"device": "cuda"},
            ["model_type qwen3_5_text: flash-linear-attention is not installed"],
        ),
    ],
    ids=str,
)
def test_what_gated_delta_nets_rule_out(
    models: Path, options: dict[str, object], place: dict[str, object], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)  # which tells that it cannot be imported
    problems = found(models / "qwen3_5_text", evolve(ONE, **options), **place)
    assert sorted(problem.partition(": ")[2].partition(", which computes")[0] for problem in problems) == sorted(expected)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_ADAPTERS])
def test_adapters_are_beside_all_linear_layers(models: Path, name: str) -> None:
    """Those of transformers' model but the head, as PEFT counts them; a target that is none is named."""
    config = AutoConfig.from_pretrained(models / name)
    expected = linear_names(models / name)
    found_layers = linear_layers(architecture_of(config), dims_of(config))
    assert found_layers == expected
    assert list(found_layers) == list(expected), "another order"
    assert found(models / name, lora=LoraSpec(rank=4)) == []
    (problem,) = found(models / name, lora=LoraSpec(targets=("gate",)))
    assert problem.startswith('lora.targets: "gate"')


def test_sixty_one_layers_are_planned() -> None:
    """DeepSeek-V3 itself on 256 GPUs: sizes that fit are found, in uneven stages too; its parameters are the 671 billion of the
    paper."""
    config = AutoConfig.for_model("deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    dims, model = dims_of(config), standard_config(config)
    assert Parameters.of(dims, ONE).total == pytest.approx(671.0e9, rel=0.001)
    load = Workload(world_size=256, model=model, device="cuda", max_sequence_length=4096, memory_bytes=141 * 10**9)
    for stages in ("auto", 16):
        chosen = choose(MegatronConfig(transformer_engine=True, pipeline_parallel=stages), load).config
        assert sum(layers_of_stages(chosen, dims.num_layers)) == 61
        assert estimate(dims, chosen, load).total <= load.usable_bytes


@pytest.mark.parametrize(
    ("name", "values", "options", "expected"),
    [
        ("glm4_moe", {"norm_topk_prob": False}, {}, "config.json: norm_topk_prob = false"),
        ("deepseek_v3", {"n_group": 3}, {}, "config.json: n_group = 3 and topk_group = 2, with n_routed_experts = 8"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, {}, 'config.json: rope_type = "yarn"'),
        ("gpt_oss", {}, {"expert_tensor_parallel": 2}, "trainer.megatron.expert_tensor_parallel: 2, with model_type gpt_oss"),
    ],
    ids=str,
)
def test_a_reference_is_held_against_its_own_family(
    models: Path, tmp_path: Path, name: str, values: dict[str, object], options: dict[str, int], expected: str
) -> None:
    reference = ModelSpec(path=str(changed(models, tmp_path, name, **values)))
    config, place = evolve(ONE, **options), {"world_size": 2, "needs_reference": True}
    of_policy = found(models / "deepseek_v3", config, **place)
    assert set(found(models / "deepseek_v3", config, reference=reference, **place)) - set(of_policy) == {expected}


def test_a_table_that_megatron_takes_for_the_policy_alone_is_refused(models: Path) -> None:
    config = evolve(ONE, recompute="selective", transformer={"recompute_modules": ["mla_up_proj"]})
    reference = ModelSpec(path=str(models / "glm4_moe"))
    (problem,) = found(models / "deepseek_v3", config, reference=reference, needs_reference=True)
    assert problem.startswith("trainer.megatron.transformer: recompute_modules, refused with: mla_up_proj")
    assert found(models / "deepseek_v3", config) == []


def test_a_frozen_model_by_itself_has_no_losses_of_routers(models: Path) -> None:
    config = evolve(ONE, transformer={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1})
    assert found(models / "glm4_moe", config, needs_policy=False, needs_reference=True) == []


def test_adapters_of_a_shared_expert_whose_tokens_megatron_gathers_are_refused(models: Path) -> None:
    table = {"moe_shared_expert_overlap": True}
    options = {"world_size": 2, "lora": LoraSpec(rank=4)}
    (problem,) = found(models / "glm4_moe", evolve(ONE, tensor_parallel=2, transformer=table), **options)
    assert problem.startswith("trainer.megatron.transformer.moe_shared_expert_overlap: true")
    assert found(models / "glm4_moe", evolve(ONE, transformer=table), **options) == []
