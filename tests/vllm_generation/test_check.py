"""What cannot work is found before anything is allocated, all at once, with the key to change."""

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.schema.structure import structure
from rlcore.spi import CheckContext, Delta, LoraSpec, ModelSpec, Note, Problem
from rlcore.testing.models import make_model
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.device_memory import GIB
from rlcore_vllm import check as check_module
from rlcore_vllm import settings
from rlcore_vllm.check import adapter_problems, check
from rlcore_vllm.config import VllmConfig

Problems = Callable[..., list[Problem]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two of them for keys and values."""
    return make_model(tmp_path_factory.mktemp("check") / "model", "qwen3", max_length=128, hidden_size=128)


@pytest.fixture
def problems(model: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """The problems of a section; on "cuda" with so many devices of so many bytes."""

    def find(
        *,
        device: str = "cpu",
        length: int = 64,
        config: dict[str, Any] | None = None,
        memories: Any = (80 * GIB,),
        world_size: int = 1,
        shared: tuple[int, ...] | None = None,
        channel: str | None = None,
        delta: Delta = "off",
        planned: Collection[str] = (),
        **options: Any,
    ) -> list[Problem]:
        monkeypatch.setattr(check_module, "device_memories", lambda: None if memories is None else list(memories))
        monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
        directory = model
        if config is not None:
            directory = model.parent / "other"
            directory.mkdir(exist_ok=True)
            for file in model.iterdir():
                (directory / file.name).write_bytes(file.read_bytes())
            changed = json.loads((model / "config.json").read_text()) | config
            (directory / "config.json").write_text(json.dumps(changed))
        context = CheckContext(
            channel=channel,
            delta=delta,
            model=ModelSpec(path=str(directory), dtype="float32" if device == "cpu" else "bfloat16"),
            device=device,  # type: ignore[arg-type]
            world_size=world_size,
            max_sequence_length=length,
            generator_devices=shared,
            planned_options=frozenset(planned),
        )
        return list(check(context, VllmConfig(**({"gpu_memory_utilization": 0.5} | options))))

    return find


def test_what_fits_has_no_problems(problems: Problems) -> None:
    assert problems() == []
    assert problems(device="cuda", replicas=2, devices=(0,), quantization="fp8") == []
    assert problems(device="cuda", tensor_parallel=2, devices=(0, 1), memories=[80 * GIB] * 2) == []
    assert problems(device="cuda", tensor_parallel=2, world_size=4, shared=(0, 1), memories=[80 * GIB] * 2) == []
    assert problems(engine={"block_size": 32, "hf_overrides": {"rope_theta": 1e6}, "async_scheduling": True}) == []


def test_devices_of_a_cluster_need_not_be_on_the_drivers_machine(problems: Problems) -> None:
    assert problems(device="cuda", shared=(1,), channel="nccl", memories=[80 * GIB]) == []
    assert problems(device="cuda", shared=(1,), channel="nccl", memories=()) == []


def test_mirrors_need_whole_tensors(problems: Problems) -> None:
    mirrors = ("http://127.0.0.1:8000",)
    (problem,) = problems(channel="shards", mirrors=mirrors)
    assert (problem.path, problem.found) == ("refit.channel", "shards, with generator.vllm.mirrors")
    assert problems(channel="nccl", mirrors=mirrors) == problems(channel="shards") == []


@pytest.mark.parametrize("key", ["quantization", "kv_cache_dtype"])
def test_samples_in_8_bits_that_nothing_corrects_are_noted(model: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "device_memories", lambda: [80 * GIB])
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    context = CheckContext(model=ModelSpec(path=str(model)), device="cuda", world_size=1, max_sequence_length=64)
    config = VllmConfig(gpu_memory_utilization=0.5, **{key: "fp8"})
    assert check(context, config) == []
    taken_for_granted = evolve(context, corrects_staleness=False)
    assert check(taken_for_granted, VllmConfig(gpu_memory_utilization=0.5)) == []
    (note,) = check(taken_for_granted, config)
    assert isinstance(note, Note)
    assert note.path == f"generator.vllm.{key}"


@pytest.mark.parametrize(
    ("channel", "share", "why"),
    [(None, 0.92, "to themselves"), ("nccl", 0.92, "to themselves"), ("cuda_ipc", 0.5, "is not known")],
)
def test_what_auto_is_without_a_plan_is_noted(problems: Problems, channel: str | None, share: float, why: str) -> None:
    (note,) = problems(device="cuda", channel=channel, gpu_memory_utilization="auto")
    assert isinstance(note, Note)
    assert note.path == "generator.vllm.gpu_memory_utilization"
    assert f'"auto" is {share} of a device' in note.text
    assert why in note.text
    assert problems(gpu_memory_utilization="auto") == []


@pytest.mark.parametrize(
    ("memories", "share", "why"),
    [(None, 0.5, "not known here"), ([1 * GIB], 0.91, "and leave as much")],
)
def test_what_auto_is_beside_copies_of_weights_is_noted(model: Path, monkeypatch, memories, share: float, why: str) -> None:
    for module in (check_module, settings):
        monkeypatch.setattr(module, "device_memories", lambda: memories)
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    spec = ModelSpec(path=str(model))
    context = CheckContext(model=spec, device="cuda", world_size=1, max_sequence_length=64, channel="shards", delta="device")
    (note,) = check(context, VllmConfig(devices=(0,), max_num_seqs=2))
    assert isinstance(note, Note)
    assert f'"auto" is {share} of a device: engines have their devices to themselves' in note.text
    assert why in note.text


def test_a_device_that_something_else_is_on_is_noted(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "free_memories", lambda: [79 * GIB, 30 * GIB])
    devices = {"device": "cuda", "devices": (0, 1), "replicas": 2, "memories": [80 * GIB] * 2}
    assert problems(**devices, gpu_memory_utilization=0.37) == []
    (note,) = problems(**devices, gpu_memory_utilization=0.4)
    assert isinstance(note, Note)
    assert note.text.startswith("0.4 of 80.0 GiB, of which 30.0 GiB are free at the moment: something else is on device 1")
    assert note.text.endswith("set at most 0.37")


@pytest.mark.parametrize(
    ("channel", "remedy"), [("cuda_ipc", "residency.offload_trainer"), ("nccl", "Set it to more than 0.66")]
)
def test_a_planned_share_that_is_too_small_names_who_has_the_rest(problems: Problems, channel: str, remedy: str) -> None:
    planned = {"planned": {"gpu_memory_utilization"}, "gpu_memory_utilization": 0.4}
    (problem,) = problems(device="cuda", config=LARGE, memories=[200 * GIB], channel=channel, **planned)
    assert problem.found.startswith('"auto", which is 0.4 of 200.0 GiB')
    assert remedy in problem.remedy


def undescribed(model: Path, tmp_path: Path, **content: Any) -> list[str]:
    """What is found of Gemma 3 with this in its config.json, on CPU and with routing to be replayed."""
    directory = Path(shutil.copytree(model, tmp_path / "gemma"))
    gemma = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "max_position_embeddings": 128}
    (directory / "config.json").write_text(json.dumps(gemma | content))
    spec = ModelSpec(path=str(directory))
    context = CheckContext(model=spec, device="cpu", world_size=1, max_sequence_length=129, replays_routing=True)
    return [problem.found for problem in check(evolve(context, generator_lora=LoraSpec()), VllmConfig())]


def test_of_a_model_that_no_family_describes_lengths_and_heads_are_checked(model: Path, tmp_path: Path) -> None:
    found = undescribed(model, tmp_path, head_dim=8, attn_logit_softcapping=50.0)
    expected = ["max_position_embeddings = 128", "adapters apart", "true, for model_type gemma3_text", "head_dim = 8"]
    expected += ["attn_logit_softcapping = 50.0"]
    assert [text.partition(" from")[0] for text in found] == expected


def test_of_such_a_model_malformed_values_alone_are_told(model: Path, tmp_path: Path) -> None:
    (found,) = undescribed(model, tmp_path, max_position_embeddings="many")
    assert found.startswith("max_position_embeddings = ")


@pytest.mark.parametrize(
    ("capabilities", "devices", "lowest"),
    [([(8, 9)], None, None), ([(8, 0), (9, 0)], (1,), None), (None, None, None), ([(8, 0), (9, 0)], (0, 1), "8.0")],
)
def test_float8_needs_a_gpu_that_multiplies_it(
    problems: Problems, monkeypatch: pytest.MonkeyPatch, capabilities: Any, devices: Any, lowest: str | None
) -> None:
    monkeypatch.setattr(check_module, "compute_capabilities", lambda: capabilities)
    options = {"device": "cuda", "devices": devices, "replicas": len(devices or (0,)), "memories": [80 * GIB] * 2}
    found = [str(problem) for problem in problems(quantization="fp8_per_block", kv_cache_dtype="fp8", **options)]
    where = f"on a GPU of compute capability {lowest}; expected"
    wanted = [f'quantization: found "fp8_per_block" {where} "none".', f'kv_cache_dtype: found "fp8" {where} "auto".']
    assert [text.partition(" 8 bits")[0] for text in found] == [f"generator.vllm.{text}" for text in wanted if lowest]
    assert problems(**options) == []


@pytest.mark.parametrize("wrong", ["localhost:8000", "http://host:abc", "http://host:99999", "https://"])
def test_a_mirror_is_an_address(wrong: str) -> None:
    right = ["http://127.0.0.1:8000", "https://mirror/v"]
    _, (problem,) = structure({"mirrors": [*right, wrong]}, VllmConfig, "generator.vllm")
    assert problem.path == "generator.vllm.mirrors[2]"


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


def test_the_build_for_the_other_device_is_named(problems: Problems, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cuda"})
    context = CheckContext(model=ModelSpec(path=str(model)), device="cpu", world_size=1, max_sequence_length=8)
    (problem,) = check(context, VllmConfig())
    assert str(problem).startswith("run.device: found cpu, with a vLLM that was built for cuda; expected cuda")


@pytest.mark.parametrize(
    ("config", "length", "limit"),
    [
        ({}, 129, "max_position_embeddings = 128"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 257, "max_position_embeddings = 256"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 257, "max_position_embeddings = 256"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 129, "max_position_embeddings = 128"),
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
    assert problems(config={"head_dim": 8}, device="cuda") == []


LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
"""70.6 billion parameters."""


def test_a_model_too_large_says_how_much_is_needed_and_which_key_to_change(problems: Problems) -> None:
    (problem,) = problems(device="cuda", config=LARGE)
    assert problem.path == "generator.vllm.gpu_memory_utilization"
    assert problem.found == "0.5 of 80.0 GiB, which gives an engine 40.0 GiB"
    assert "131.4 GiB of weights" in problem.expected
    assert problem.remedy == "Raise tensor_parallel, with more devices."
    shared = {"replicas": 2, "devices": (0,), "gpu_memory_utilization": 0.9}
    (problem,) = problems(device="cuda", config=LARGE, memories=[280 * GIB], **shared)
    assert "shared by 2 engines, which gives an engine 126.0 GiB" in problem.found
    assert problem.remedy == "Set it to more than 0.94."
    assert problems(device="cuda", config=LARGE, gpu_memory_utilization=0.9, memories=[200 * GIB]) == []
    (share,) = problems(device="cuda", config=LARGE, memories=[200 * GIB])
    assert share.remedy == "Set it to more than 0.66."
    assert problems(device="cuda", config=LARGE, memories=None) == []


def test_log_probabilities_kept_on_the_device_count(problems: Problems) -> None:
    """2.25 rows of float32 for each sequence that is decoded at a time, and one."""
    assert problems(device="cuda", memories=[GIB], max_num_seqs=1024) == []
    (problem,) = problems(device="cuda", memories=[GIB], max_num_seqs=1024 * 1024)
    assert problem.path == "generator.vllm.gpu_memory_utilization"
    assert "0.6 GiB of log-probabilities (by max_num_seqs)" in problem.expected
    # On each rank, which all have a cache as large as the one that keeps them.
    (problem,) = problems(device="cuda", memories=[GIB] * 2, max_num_seqs=1024 * 1024, tensor_parallel=2, devices=(0, 1))
    assert "0.6 GiB of log-probabilities (by max_num_seqs)" in problem.expected


@pytest.mark.parametrize(("channel", "copies"), [("shards", "131.4 GiB"), ("directory", "262.8 GiB")])
def test_copies_for_refits_of_changes_come_on_top(problems: Problems, channel: str, copies: str) -> None:
    """Of all weights for each engine and, where whole tensors travel, for their sender."""
    large: dict[str, Any] = {"device": "cuda", "config": LARGE, "channel": channel, "gpu_memory_utilization": 0.8}
    (problem,) = problems(delta="device", memories=[400 * GIB], **large)
    assert problem.path == "generator.vllm.gpu_memory_utilization"
    assert problem.found == f'0.8 of 400.0 GiB, with refit.delta = "device" over {channel}'
    assert copies in problem.expected
    tells_a_share = (
        "Set it to at most 0.67, or refit.delta" if channel == "shards" else "Set it to at most 0.34, or refit.delta"
    )
    assert problem.remedy == f'{tells_a_share} = "host".'
    (none_left,) = problems(delta="device", memories=[200 * GIB], **large)
    assert none_left.remedy == 'Set refit.delta = "host".'
    assert problems(delta="host", memories=[200 * GIB], **large) == []
    assert problems(delta="device", memories=[1400 * GIB], **large) == []
    shared = large | {"replicas": 2, "devices": (0,)}
    (of_two,) = problems(delta="device", memories=[800 * GIB], **shared)
    assert ("262.8 GiB" if channel == "shards" else "394.2 GiB") in of_two.expected


def test_a_kv_cache_too_small_for_one_sequence(problems: Problems) -> None:
    (problem,) = problems(config=LARGE, length=4096, cpu_kv_cache_gib=2.0)
    # 2 · 80 layers · 8 heads · 128 · 4 bytes = 640 KiB a token, and 33 blocks of 128 tokens
    assert str(problem).startswith(
        "generator.vllm.cpu_kv_cache_gib: found 2.0; expected at least 2.58: one sequence of 4096 tokens needs 2.6 GiB"
    )
    assert "rollout.max_prompt_tokens" in problem.remedy


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
    assert list(adapter_problems(LoraSpec(rank=512), "cuda", mixed)) == []
    assert [problem.path for problem in adapter_problems(LoraSpec(rank=513), "cpu", mixed)] == ["refit.adapters", "lora.rank"]
    assert list(adapter_problems(LoraSpec(), "cpu", None)) == []
