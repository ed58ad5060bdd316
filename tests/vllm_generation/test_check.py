"""What cannot work is found before anything is allocated, all at once, with the key to change."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve

from rlcore.schema.structure import structure
from rlcore.spi import CheckContext, LoraSpec, ModelSpec, Note
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.distributed.format_bytes import GIB
from rlcore_vllm.checks import check as check_module
from rlcore_vllm.checks import float8_check
from rlcore_vllm.checks.check import adapter_problems, check
from rlcore_vllm.setup.config import VllmConfig

from .vllm_checked import Problems

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_what_fits_has_no_problems(problems: Problems) -> None:
    assert problems() == []
    (note,) = problems(device="cuda", replicas=2, devices=(0,), quantization="fp8")
    assert isinstance(note, Note)
    assert problems(device="cuda", tensor_parallel=2, devices=(0, 1), memories=[80 * GIB] * 2) == []
    assert problems(device="cuda", tensor_parallel=2, world_size=4, shared=(0, 1), memories=[80 * GIB] * 2) == []
    assert problems(engine={"block_size": 32, "hf_overrides": {"rope_theta": 1e6}, "async_scheduling": True}) == []


def test_devices_of_a_cluster_need_not_be_on_the_drivers_machine(problems: Problems) -> None:
    assert problems(device="cuda", shared=(1,), channel="nccl", memories=[80 * GIB]) == []
    assert problems(device="cuda", shared=(1,), channel="nccl", memories=()) == []


def test_mirrors_need_whole_tensors(problems: Problems) -> None:
    followers = ("http://127.0.0.1:8000",)
    (problem,) = problems(channel="shards", followers=followers)
    assert (problem.path, problem.found) == ("refit.channel", "shards, with generator.vllm.followers")
    assert problems(channel="nccl", followers=followers) == problems(channel="shards") == []


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_samples_in_8_bits_are_noted(checked: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "device_memories", lambda: [80 * GIB])
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    context = CheckContext(model=ModelSpec(path=str(checked)), device="cuda", world_size=1, max_sequence_length=64)
    config = VllmConfig(gpu_memory_utilization=0.5, **{key: "fp8"})
    taken_for_granted = evolve(context, corrects_staleness=False)
    assert check(taken_for_granted, VllmConfig(gpu_memory_utilization=0.5)) == []
    uncorrected, bound = check(taken_for_granted, config)
    assert isinstance(uncorrected, Note)
    assert uncorrected.text.startswith("samples come from a policy in 8 bits")
    assert check(context, config) == [bound]
    assert isinstance(bound, Note)
    assert "training.max_token_mult_prob_error" in bound.text
    assert uncorrected.path == bound.path == f"generator.vllm.{key}"


def without_weights(checked: Path, directory: Path) -> Path:
    """Copy a model without its weights, which a config.json of another model would contradict."""
    return Path(shutil.copytree(checked, directory, ignore=shutil.ignore_patterns("*.safetensors")))


def undescribed(checked: Path, tmp_path: Path, **content: Any) -> list[str]:
    """What is found of Gemma 3 with this in its config.json, on CPU and with routing to be replayed."""
    directory = without_weights(checked, tmp_path / "gemma")
    gemma = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "max_position_embeddings": 128}
    (directory / "config.json").write_text(json.dumps(gemma | content))
    spec = ModelSpec(path=str(directory))
    context = CheckContext(model=spec, device="cpu", world_size=1, max_sequence_length=129, replays_routing=True)
    return [problem.found for problem in check(evolve(context, generator_lora=LoraSpec()), VllmConfig())]


def test_of_a_model_that_no_family_describes_lengths_and_heads_are_checked(checked: Path, tmp_path: Path) -> None:
    found = undescribed(checked, tmp_path, head_dim=8, attn_logit_softcapping=50.0)
    expected = ["max_position_embeddings = 128", "unmerged adapters of a model of model_type gemma3_text"]
    expected += ["true, for model_type gemma3_text", "head_dim = 8", "attn_logit_softcapping = 50.0"]
    assert [text.partition(" from")[0] for text in found] == expected


def test_of_latent_attention_the_size_is_checked_and_what_vllm_alone_reads(checked: Path, tmp_path: Path) -> None:
    directory = without_weights(checked, tmp_path / "deepseek")

    def found(device: Literal["cpu", "cuda"] = "cpu", overrides: Any = None, **content: Any) -> list[str]:
        deepseek = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 128}
        (directory / "config.json").write_text(json.dumps(deepseek | content))
        model = ModelSpec(path=str(directory))
        context = CheckContext(model=model, device=device, world_size=1, max_sequence_length=64)
        config = VllmConfig(engine={"hf_overrides": overrides or {}})
        return [problem.found for problem in check(context, config) if problem.path.endswith("config.json")]

    read = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert found(kv_lora_rank=512, qk_rope_head_dim=64, **read) == []
    assert found(kv_lora_rank=16, qk_rope_head_dim=8, **read) == ["kv_lora_rank = 16 and qk_rope_head_dim = 8"]
    assert found(kv_lora_rank=256, qk_rope_head_dim=64, **read) == ["kv_lora_rank = 256 and qk_rope_head_dim = 64"]
    assert found("cuda", kv_lora_rank=256, qk_rope_head_dim=64, **read) == []
    assert found(overrides=read, kv_lora_rank=512, qk_rope_head_dim=64) == []
    softmax = found(overrides={"scoring_func": "softmax"}, kv_lora_rank=512, qk_rope_head_dim=64, **read)
    assert softmax == ['scoring_func = "softmax"']
    dense = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    assert found(kv_lora_rank=512, qk_rope_head_dim=64, **dense) == []
    assert found(kv_lora_rank=512, qk_rope_head_dim=64, **dense | {"first_k_dense_replace": 1}) == [
        "no topk_method",
        "no scoring_func",
    ]
    assert found(kv_lora_rank=512, qk_rope_head_dim=64, scoring_func="softmax") == [
        "no topk_method",
        'scoring_func = "softmax"',
    ]


def test_of_mimo_the_keys_are_checked_that_vllm_reads_in_place_of_transformers(tmp_path: Path) -> None:
    rotary = {"full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    rotary["sliding_attention"] = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    keys = {"add_swa_attention_sink_bias": True, "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.5}

    def found(**content: Any) -> list[str]:
        mimo = {"model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"], "max_position_embeddings": 128}
        (tmp_path / "config.json").write_text(json.dumps(mimo | content))
        context = CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=64)
        return [problem.found for problem in check(context, VllmConfig()) if problem.path.endswith("config.json")]

    assert found(rope_parameters=rotary, **keys) == []
    assert found(rope_parameters=rotary, **keys | {"swa_rope_theta": 5e6}) == ["swa_rope_theta = 5000000.0"]
    assert sorted(found(rope_parameters=rotary)) == sorted(f"no {key}" for key in keys)
    assert found() == ["no add_swa_attention_sink_bias"]
    for odd in ({"full_attention": "x"}, {"rope_type": "default", "rope_theta": 5e6}, {"full_attention": None}):
        assert found(rope_parameters=odd, **keys) == []
    sliding, layers = rotary["sliding_attention"], "rope_parameters.sliding_attention"
    for changed, problem in (
        ({"rope_type": "linear"}, f'{layers}.rope_type = "linear"'),
        ({"partial_rotary_factor": 0.25}, f"{layers}.partial_rotary_factor = 0.25"),
    ):
        assert found(rope_parameters=rotary | {"sliding_attention": sliding | changed}, **keys) == [problem]
    default = {name: {"rope_theta": table["rope_theta"]} for name, table in rotary.items()}
    assert found(rope_parameters=default, **keys | {"partial_rotary_factor": 0.334}) == []


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("hrm_text", "HrmTextForCausalLM", "prompts"),
        ("gemma3n_text", "Gemma3nForCausalLM", "log-probabilities"),
        ("minimax_m2", "MiniMaxM2ForCausalLM", "log-probabilities"),
        ("inkling_text", "InklingForCausalLM", "tokenizer"),
    ],
)
@pytest.mark.parametrize("size", [64, [64, 64]])
def test_a_family_that_vllm_computes_otherwise_is_refused(
    model_type: str, architecture: str, reason: str, size: Any, tmp_path: Path
) -> None:
    content = {"model_type": model_type, "architectures": [architecture], "intermediate_size": size}
    (tmp_path / "config.json").write_text(json.dumps(content))
    context = CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=64)
    (problem,) = [problem for problem in check(context, VllmConfig()) if model_type in problem.found]
    assert reason in problem.found


@pytest.mark.parametrize(
    ("device", "channel", "quantization", "found"),
    [
        ("cpu", "in_process", "none", ["model_type gpt_oss, on CPU"]),
        ("cpu", None, "none", []),
        ("cuda", "cuda_ipc", "none", []),
        ("cuda", "cuda_ipc", "fp8", ['"fp8", with model_type gpt_oss']),
        ("cuda", None, "fp8", []),
    ],
)
def test_what_vllm_cannot_load_again_is_refused(
    device: Literal["cpu", "cuda"],
    channel: str | None,
    quantization: Literal["none", "fp8"],
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gpt-oss where its weights are packed or quantised, if a trainer sends them."""
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    monkeypatch.setattr(check_module, "device_memories", lambda: [80 * GIB])
    monkeypatch.setattr(float8_check, "compute_capabilities", lambda: [(9, 0)])
    content = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    spec = ModelSpec(path=str(tmp_path))
    context = CheckContext(model=spec, device=device, world_size=1, max_sequence_length=64, channel=channel)
    told = [problem.found for problem in check_module.problems_of(context, VllmConfig(quantization=quantization))]
    assert [text.partition(", which")[0] for text in told] == found


def test_of_such_a_model_malformed_values_alone_are_told(checked: Path, tmp_path: Path) -> None:
    (found,) = undescribed(checked, tmp_path, max_position_embeddings="many")
    assert found.startswith("max_position_embeddings = ")


@pytest.mark.parametrize(
    ("capabilities", "devices", "lowest"),
    [([(8, 9)], None, None), ([(8, 0), (9, 0)], (1,), None), (None, None, None), ([(8, 0), (9, 0)], (0, 1), "8.0")],
)
def test_float8_needs_a_gpu_that_multiplies_it(
    problems: Problems, monkeypatch: pytest.MonkeyPatch, capabilities: Any, devices: Any, lowest: str | None
) -> None:
    monkeypatch.setattr(float8_check, "compute_capabilities", lambda: capabilities)
    options = {"device": "cuda", "devices": devices, "replicas": len(devices or (0,)), "memories": [80 * GIB] * 2}
    told = problems(quantization="fp8_per_block", kv_cache_dtype="fp8", **options)
    found = [str(problem) for problem in told if not isinstance(problem, Note)]
    where = f"on a GPU of compute capability {lowest}; expected"
    wanted = [f'quantization: found "fp8_per_block" {where} "none".', f'kv_cache_dtype: found "fp8" {where} "auto".']
    assert [text.partition(" 8 bits")[0] for text in found] == [f"generator.vllm.{text}" for text in wanted if lowest]
    assert problems(**options) == []


@pytest.mark.parametrize("wrong", ["localhost:8000", "http://host:abc", "http://host:99999", "https://"])
def test_a_mirror_is_an_address(wrong: str) -> None:
    right = ["http://127.0.0.1:8000", "https://follower/v"]
    _, (problem,) = structure({"followers": [*right, wrong]}, VllmConfig, "generator.vllm")
    assert problem.path == "generator.vllm.followers[2]"


@pytest.mark.parametrize(
    ("table", "path", "found", "remedy"),
    [
        ({"block_sizes": 9}, "block_sizes", "an unknown key", "Did you mean block_size?"),
        ({"max_num_batched_tokens": 9}, "max_num_batched_tokens", "sets itself", "Set generator.vllm.max_num_batched_tokens."),
        ({"zzz": 1}, "zzz", "an unknown key", "`vllm serve --help=all` lists them, with dashes for underscores."),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "sets itself", "Set generator.vllm.tensor_parallel."),
        ({"max_model_len": 9}, "max_model_len", "sets itself", "rollout.max_prompt_tokens and rollout.max_response_tokens"),
        ({"block_size": "16"}, "block_size", "'16' (str)", ""),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill", "1 (int)", ""),
        ({"hf_overrides": "x"}, "hf_overrides", "'x' (str)", ""),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "sets itself", "Set generator.vllm.kv_cache_dtype."),
        ({"calculate_kv_scales": True}, "calculate_kv_scales", "sets itself", "vLLM calculates scales once"),
        ({"swap_space": True}, "swap_space", "an unknown key", ""),
    ],
)
def test_the_engines_table_is_held_against_vllms_own_arguments(
    problems: Problems, table: dict[str, object], path: str, found: str, remedy: str
) -> None:
    (problem,) = problems(engine=table)
    assert problem.path == f"generator.vllm.engine.{path}"
    assert found in problem.found
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu", "quantization": "fp8"}, 'quantization: found "fp8" on CPU; expected "none"'),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, 'kv_cache_dtype: found "fp8" on CPU; expected "auto"'),
        ({"device": "cpu", "devices": (0,)}, "devices: found [0] on CPU; expected no such key"),
        ({"tensor_parallel": 2}, "devices: found nothing, with tensor_parallel = 2; expected 2 devices"),
        ({"devices": (0, 0), "replicas": 2}, "devices: found [0] more than once; expected each device once. Raise replicas"),
        ({"devices": (0, 3), "replicas": 2}, "devices: found [3]; expected the 1 there are, counted from 0"),
        ({"devices": (-1,)}, "devices: found [-1]"),
        ({"devices": (-1,), "memories": None}, "devices: found [-1]; expected numbers of at least 0"),
        ({"devices": (0,), "world_size": 2}, "devices: found [0]; expected no such key beside [cluster]"),
        ({"devices": ()}, "devices: found 0 of them; expected a multiple of tensor_parallel = 1"),
        ({"devices": (0,), "tensor_parallel": 2}, "devices: found 1 of them; expected a multiple of tensor_parallel = 2"),
        ({"devices": (0, 1), "memories": [GIB] * 2}, "devices: found 2 of them, of which 1 x 1 are used; expected at most 1"),
    ],
)
def test_devices_that_are_not_there_or_not_needed(problems: Problems, options: dict[str, Any], expected: str) -> None:
    assert any(expected in str(problem) for problem in problems(**{"device": "cuda"} | options))


def test_the_build_for_the_other_device_is_named(problems: Problems, monkeypatch: pytest.MonkeyPatch, checked: Path) -> None:
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cuda"})
    context = CheckContext(model=ModelSpec(path=str(checked)), device="cpu", world_size=1, max_sequence_length=8)
    (problem,) = check(context, VllmConfig())
    assert str(problem).startswith("run.device: found cpu, with a vLLM that was built for cuda; expected cuda")


@pytest.mark.parametrize(
    ("config", "length", "limit"),
    [
        ({}, 129, "max_position_embeddings = 128"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 257, "max_position_embeddings = 256"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 257, "max_position_embeddings = 256"),
        ({"rope_parameters": LLAMA3}, 129, "max_position_embeddings = 128"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            513,
            "max_position_embeddings = 512",
        ),
    ],
)
def test_sequences_beyond_the_models_positions(problems: Problems, config: dict[str, Any], length: int, limit: str) -> None:
    (problem,) = problems(config=config, length=length)
    assert limit in problem.found
    assert "rollout.max_prompt_tokens" in problem.remedy
    assert problems(config=config, length=length - 1) == []


@pytest.mark.parametrize(
    ("config", "width", "expected"),
    [
        ({}, 3, "found 3, with a model of 4 attention heads; expected one of 1, 2, 4"),
        ({}, 4, None),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 384},
            6,
            "found 6, with a model of 4 key-value heads",
        ),
        ({"intermediate_size": 97}, 2, "found 2, with a model of MLPs 97 wide"),
    ],
)
def test_tensor_parallelism_divides_heads(problems: Problems, config: dict[str, Any], width: int, expected: str | None) -> None:
    found = [str(problem) for problem in problems(config=config, tensor_parallel=width)]
    assert len(found) == (0 if expected is None else 1)
    assert all(str(expected) in problem for problem in found)


def test_a_head_size_without_a_kernel_on_cpu(problems: Problems) -> None:
    (problem,) = problems(config={"head_dim": 8})
    assert problem.found == "head_dim = 8"
    assert "one of 32, 64, 80" in problem.expected
    assert "head_dim = 8" not in [one.found for one in problems(config={"head_dim": 8}, device="cuda")]


def test_foreign_models_are_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    context = CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=8)
    (problem,) = check(context, VllmConfig())
    assert problem.found == "model_type odd"


def test_adapters_that_vllm_cannot_compute_are_refused() -> None:
    mixed = ModelDims.of(
        {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    )
    assert mixed is not None
    assert list(adapter_problems(LoraSpec(rank=512), "cuda", "bfloat16", mixed)) == []
    too_many = adapter_problems(LoraSpec(rank=513), "cpu", "float32", mixed)
    assert [problem.path for problem in too_many] == ["refit.adapters", "lora.rank"]
    assert [problem.path for problem in adapter_problems(LoraSpec(), "cuda", "float32", None)] == ["model.dtype"]
    assert list(adapter_problems(LoraSpec(), "cpu", "float32", None)) == []
