"""The engine's arguments and devices, from the section of the recipe."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import (
    GeneratorContext,
    ModelSpec,
    RankInfo,
)
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model
from rlcore_torchkit.trainer.trainer_plan import planned_model
from rlcore_vllm.setup import settings
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.memory import model_size
from rlcore_vllm.setup.settings import capture_sizes, engine_settings, engines_per_device, image_arguments, replica_devices


def settings_of(device, length=100, channel="in_process", path="x", **options):
    rank_info = RankInfo(device=device)
    context = GeneratorContext(
        model=ModelSpec(path=path), rank_info=rank_info, seed=0, max_sequence_length=length, channel=channel
    )
    return engine_settings(context, VllmConfig(**options))


def arguments_of(device, length=100, **options):
    return settings_of(device, length, **options).arguments


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 8192),
        ({"max_num_batched_tokens": 3000}, 3000),
        ({"max_num_batched_tokens": 3000, "max_num_seqs": 4096}, 4096),
        ({"max_num_seqs": 10_000}, 10_000),
    ],
)
def test_a_step_takes_as_many_tokens_as_the_section_says_and_one_of_each_sequence(device, options, expected):
    """vLLM's scheduler refuses fewer tokens than sequences, and without this would take 2,048 of them."""
    from vllm.config import SchedulerConfig

    arguments = arguments_of(device, **options)
    assert arguments["max_num_batched_tokens"] == expected
    lengths = {name: arguments[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    SchedulerConfig(**lengths, is_encoder_decoder=False)  # which raises where it refuses them


def test_on_a_cpu_a_step_takes_a_whole_prompt():
    assert arguments_of("cpu", 9000)["max_num_batched_tokens"] == 9000
    assert arguments_of("cuda", 9000)["max_num_batched_tokens"] == 8192


def share_of(channel, model, *, memories, monkeypatch, delta="device", **options):
    monkeypatch.setattr(settings, "device_memories", lambda: memories)
    rank_info, spec = RankInfo(device="cuda"), ModelSpec(path=str(model), dtype="bfloat16")
    context = GeneratorContext(model=spec, rank_info=rank_info, seed=0, max_sequence_length=100, channel=channel, delta=delta)
    return engine_settings(context, VllmConfig(**options)).arguments["gpu_memory_utilization"]


def test_auto_leaves_room_for_copies_of_weights_or_far_more_where_neither_is_known(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model", "qwen3")
    content = json.loads((model / "config.json").read_text())
    weights = model_size(planned_model(content).dims, "bfloat16").weights
    on = partial(share_of, model=model, monkeypatch=monkeypatch)
    small = [20 * weights]  # of which the weights are 0.05
    assert on("shards", memories=small, delta="off") == on("shards", memories=small, delta="host") == 0.92
    assert on("shards", memories=small) == 0.87
    assert on("shards", memories=small, devices=(1,)) == 0.5, "a device that is not seen"
    assert on("directory", memories=[0, *small], devices=(1,), replicas=2) == pytest.approx((0.5 - 0.15) / 2)
    assert on("shards", memories=[weights]) == 0.01, "none is left, and vLLM says so"
    assert on(None, memories=small) == 0.92, "nothing is sent"
    assert on("shards", memories=small, gpu_memory_utilization=0.9) == 0.9
    for memories in (None, []):
        assert (on("shards", memories=memories), on("directory", memories=memories)) == (0.5, 0.25)
    (model / "config.json").write_text(json.dumps(content | {"hidden_size": None}))
    assert on("shards", memories=small) == 0.5
    assert on("shards", model=tmp_path / "none", memories=small) == 0.5, "a directory that is not here"


def test_on_a_cpu_a_share_of_a_device_is_nothing_and_the_cache_has_its_own_size():
    arguments = arguments_of("cpu", gpu_memory_utilization="auto", cpu_kv_cache_gib=0.5)
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert "gpu_memory_utilization" not in arguments
    assert arguments == arguments_of("cpu", gpu_memory_utilization=0.3, cpu_kv_cache_gib=0.5)


@pytest.mark.parametrize(("channel", "share"), [("cuda_ipc", 0.5), ("directory", 0.5), ("nccl", 0.92), ("shards", 0.92)])
def test_a_share_that_nobody_planned_goes_by_who_else_can_be_on_the_device(channel, share):
    assert settings_of("cuda", channel=channel).arguments["gpu_memory_utilization"] == share
    assert settings_of("cuda", channel=channel, replicas=2).arguments["gpu_memory_utilization"] == share / 2
    assert settings_of("cuda", channel=channel, gpu_memory_utilization=0.3).arguments["gpu_memory_utilization"] == 0.3


def test_the_head_computes_in_float32_unless_the_section_says_otherwise():
    own = {"hf_overrides": {"rope_theta": 5.0}}
    assert arguments_of("cuda")["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments_of("cuda", engine=own)["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 5.0}
    assert arguments_of("cpu", engine={"hf_overrides": {"head_dtype": "model"}})["hf_overrides"] == {"head_dtype": "model"}


def test_an_engine_that_no_trainer_refits_reads_the_model_as_it_is():
    """An output head that is quantised knows no dtype but its own, and nobody puts the engine to sleep."""
    settings = settings_of("cuda", channel=None, engine={"block_size": 32})
    assert not settings.in_process
    found = {name: settings.arguments[name] for name in ("load_format", "hf_overrides", "enable_sleep_mode", "block_size")}
    assert found == {"load_format": "hf", "hf_overrides": {}, "enable_sleep_mode": False, "block_size": 32}
    assert (arguments_of("cuda")["load_format"], arguments_of("cuda")["enable_sleep_mode"]) == ("dummy", True)


def test_graphs_are_captured_for_the_largest_batch_and_prompts_beside_it():
    for largest in (1, 5, 8, 100, 1000, 1024):
        sizes = capture_sizes(VllmConfig(max_num_seqs=largest))
        assert sizes == sorted(set(sizes))
        assert largest in sizes
        assert sizes[-1] == 2 * largest
        assert all(later <= max(size + 8, 1.25 * size) for size, later in pairwise(sizes) if 8 <= size < largest)
        # A prompt or two whose beginning is in the cache must not cost a step of twice the size.
        assert all(later - size <= max(32, size - largest) for size, later in pairwise(sizes) if size >= largest)
    assert len(capture_sizes(VllmConfig(max_num_seqs=1024))) < 36


@pytest.mark.parametrize(("tokens", "most", "largest"), [(1, 8192, 2048), (1, 1500, 1500), (5, 8192, 6145), (5, 5500, 5500)])
def test_no_graph_is_captured_that_no_step_fills(tokens: int, most: int, largest: int) -> None:
    """vLLM would drop it, and of the sizes for guesses those that are no multiple of a sequence's tokens. Prompts beside all
    sequences are not more for guesses."""
    sizes = capture_sizes(VllmConfig(max_num_seqs=1024, max_num_batched_tokens=most, speculative_ngram=tokens - 1))
    assert sizes == sorted(set(sizes))
    assert tokens * 1024 in sizes
    assert sizes[-1] == largest
    assert all(size % tokens == 0 for size in sizes)
    assert min(size for size in sizes if size > tokens * 1024) - tokens * 1024 in range(32, 32 + tokens)


@pytest.mark.parametrize(
    "named",
    [
        {"cudagraph_capture_sizes": [1, 4]},
        {"max_cudagraph_capture_size": 4},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 4]}},
        {"compilation_config": {"max_cudagraph_capture_size": 4}},
    ],
)
def test_graphs_that_the_table_names_are_the_only_ones(named: dict[str, Any], tmp_path: Path) -> None:
    """vLLM takes sizes from one place, and no largest one that is not among them."""
    from vllm import EngineArgs

    arguments = arguments_of("cuda", engine=named)
    of_graphs = {key: value for key, value in arguments.items() if key in named or "cudagraph" in key}
    EngineArgs(model=str(make_model(tmp_path)), max_model_len=64, skip_tokenizer_init=True, **of_graphs).create_engine_config()
    assert of_graphs == named
    assert "cudagraph_capture_sizes" in arguments_of("cuda", engine={"compilation_config": {"mode": 0}})


def test_engines_take_the_devices_in_turn():
    assert replica_devices(VllmConfig(), 3) == [(3,)]
    assert replica_devices(VllmConfig(replicas=3, devices=(4, 5)), 0) == [(4,), (5,), (4,)]
    assert replica_devices(VllmConfig(replicas=2, tensor_parallel=2, devices=(0, 1, 2, 3)), 0) == [(0, 1), (2, 3)]
    assert engines_per_device(VllmConfig(replicas=3, devices=(4, 5))) == 2
    assert engines_per_device(VllmConfig(replicas=2)) == 2


@pytest.mark.parametrize(("quantization", "name"), [("fp8", "fp8_per_tensor"), ("fp8_per_block", "fp8_per_block")])
def test_weights_in_8_bits_are_all_but_the_routers(quantization, name):
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    arguments = arguments_of("cuda", quantization=quantization, kv_cache_dtype="fp8")
    assert arguments["quantization"] == name
    assert arguments["kv_cache_dtype"] == "fp8"
    ignored = resolve_quantization_config(name, arguments["quantization_config"]).ignore
    layer = "model.layers.3.mlp."
    for router in ("gate", "router", "shared_expert_gate"):
        assert should_ignore_layer(f"{layer}{router}", ignored)
    for other in ("gate_up_proj", "experts", "down_proj", "gate_proj"):
        assert not should_ignore_layer(f"{layer}{other}", ignored)
    assert not {"quantization", "quantization_config", "kv_cache_dtype"} & arguments_of("cuda").keys()


@pytest.mark.parametrize(
    ("device", "content", "backend"),
    [("cpu", {"kv_lora_rank": 512}, "CPU_MLA"), ("cpu", {}, None), ("cuda", {"kv_lora_rank": 512}, None)],
)
def test_latent_attention_takes_the_kernel_for_float32_on_every_processor(tmp_path, device, content, backend):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **content}))
    assert arguments_of(device, path=str(tmp_path)).get("attention_backend") == backend


def test_a_model_of_images_reads_them_and_keeps_what_it_computes_for_them(tmp_path):
    directory = make_image_model(tmp_path / "model")
    found = image_arguments(ModelSpec(path=str(directory)))
    assert (found["skip_tokenizer_init"], found["load_format"], found["mm_processor_cache_gb"]) == (False, "hf", 0)
    (directory / "config.json").write_text("{}")
    assert image_arguments(ModelSpec(path=str(directory))) == {}


def test_batch_invariant_engines_compile_nothing(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    arguments = arguments_of("cuda", batch_invariant=True)
    # A directory: a name is looked up where the Hub's library was first imported offline.
    compilation = EngineArgs(model=str(tmp_path), compilation_config=arguments["compilation_config"]).compilation_config
    assert (compilation.mode, compilation.cudagraph_mode.name, compilation.custom_ops) == (0, "FULL_DECODE_ONLY", ["all"])
    assert arguments["attention_backend"] == "FLASH_ATTN"
    assert "compilation_config" not in arguments_of("cuda", batch_invariant=True, enforce_eager=True)
    assert not {"attention_backend", "compilation_config"} & arguments_of("cuda").keys()
