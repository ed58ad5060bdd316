"""What cannot work is found before anything is allocated, all at once, with the key to change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.schema.structure import structure
from rlcore.spi import CheckContext, GeneratorContext, ModelSpec, Problem, RankInfo
from rlcore.testing.models import make_model
from rlcore_torchkit.device_memory import GIB, device_memories
from rlcore_vllm import check as check_module
from rlcore_vllm.check import check
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.engine_arguments import OWNED, engine_arguments
from rlcore_vllm.explain import explain, is_passing
from rlcore_vllm.memory import model_size
from rlcore_vllm.settings import engine_settings

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
            model=ModelSpec(path=str(directory), dtype="float32" if device == "cpu" else "bfloat16"),
            device=device,  # type: ignore[arg-type]
            world_size=world_size,
            max_sequence_length=length,
            generator_devices=shared,
        )
        return list(check(context, VllmConfig(**options)))

    return find


def test_what_fits_has_no_problems(problems: Problems) -> None:
    assert problems() == []
    assert problems(device="cuda", replicas=2, devices=(0,), quantization="fp8") == []
    assert problems(device="cuda", tensor_parallel=2, devices=(0, 1), memories=[80 * GIB] * 2) == []
    assert problems(device="cuda", tensor_parallel=2, world_size=4, shared=(0, 1), memories=[80 * GIB] * 2) == []
    assert problems(engine={"block_size": 32, "hf_overrides": {"rope_theta": 1e6}, "async_scheduling": True}) == []


def test_a_mirror_is_an_address() -> None:
    _, (problem,) = structure({"mirrors": ["localhost:8000"]}, VllmConfig, "generator.vllm")
    assert problem.path == "generator.vllm.mirrors[0]"


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


def test_arguments_read_from_the_source_are_those_of_the_class() -> None:
    """And every argument that rlcore gives an engine is either refused in the table or a default that it may change."""
    import dataclasses

    from vllm import EngineArgs

    arguments = engine_arguments()
    assert arguments.keys() == {field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")}
    assert arguments["block_size"].types == (int,)
    assert arguments["enable_chunked_prefill"].types == (bool,)
    assert arguments["kv_cache_dtype"].types is None
    assert OWNED.keys() <= arguments.keys() | {"device_ids", "data_parallel_size"}
    given: set[str] = set()
    for device in ("cpu", "cuda"):
        place = RankInfo(device=device)  # type: ignore[arg-type]
        context = GeneratorContext(model=ModelSpec(path="x"), rank_info=place, seed=0, max_sequence_length=8)
        given |= engine_settings(context, VllmConfig()).arguments.keys()
    defaults = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "enable_chunked_prefill", "hf_overrides"}
    assert given - OWNED.keys() <= defaults | {"disable_log_stats"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu", "quantization": "fp8"}, 'quantization: found "fp8" on CPU; expected "none"'),
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
    assert problems(device="cuda", memories=[GIB] * 2, max_num_seqs=1024 * 1024, tensor_parallel=2, devices=(0, 1)) == []


def test_a_kv_cache_too_small_for_one_sequence(problems: Problems) -> None:
    (problem,) = problems(config=LARGE, length=4096, cpu_kv_cache_gib=2.0)
    # 2 · 80 layers · 8 heads · 128 · 4 bytes = 640 KiB a token, and 33 blocks of 128 tokens
    assert str(problem).startswith(
        "generator.vllm.cpu_kv_cache_gib: found 2.0; expected at least 2.58: one sequence of 4096 tokens needs 2.6 GiB"
    )
    assert "rollout.max_prompt_tokens" in problem.remedy


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_model_is_that_of_its_weights(tmp_path: Path, architecture: Any, tied: bool) -> None:
    from safetensors.torch import load_file

    directory = make_model(tmp_path, architecture, tied=tied, hidden_size=64, num_heads=4, num_kv_heads=2)
    size = model_size(json.loads((directory / "config.json").read_text()), "float32")
    held = sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    assert size.weights == pytest.approx(held, rel=0.02)
    assert size.weights <= held
    assert size.kv_per_token == 2 * 2 * 2 * 16 * 4


def test_foreign_models_are_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    context = CheckContext(model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=8)
    (problem,) = check(context, VllmConfig())
    assert problem.found == "architecture OddForCausalLM"


def test_devices_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aaa, 81559'\necho '1, GPU-bbb, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_memories() == [81559 * 2**20, 143771 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device_memories() == [143771 * 2**20, 81559 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert device_memories() == [143771 * 2**20]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert device_memories() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: No available memory for the cache blocks. Try increasing", "generator.vllm.gpu_memory_utilization"),
        (
            "ValueError: To serve at least one request with the model's max seq len (256), (0.03 GiB KV cache is needed, which "
            "is larger than the available KV cache memory (0.01 GiB). Based on",
            "one sequence of 256 tokens needs 0.03 GiB of KV cache; 0.01 GiB are left for it. Raise generator.vllm.gpu_memory",
        ),
        (
            "ValueError: Free memory on device cuda:0 (11.2/79.1 GiB) on startup is less than desired GPU memory utilization "
            "(0.5, 39.5 GiB). Decrease GPU",
            "11.2 of 79.1 GiB are free on cuda:0; generator.vllm.gpu_memory_utilization = 0.5 asks for 39.5 GiB",
        ),
        (
            "ValueError: Available memory on node 0 (1.5/7.8 GiB) on kv cache allocation is less than requested memory for kv "
            "(64.0 GiB). Decrease",
            "1.5 of 7.8 GiB of the machine's memory are free, and the engine asks for 64.0 GiB. Lower generator.vllm.cpu_kv",
        ),
        (
            "Available memory on node 0 (1.5/7.8 GiB) on startup is less than desired CPU memory utilization (0.9, 7.0 GiB).",
            "asks for a share of 0.9, 7.0 GiB",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "the device's memory ran out"),
        (
            "User-specified max_model_len (999) is greater than the derived max_model_len (max_position_embeddings=512 or",
            "sequences of 999 tokens are longer than the model takes (max_position_embeddings=512)",
        ),
        (
            "Total number of attention heads (14) must be divisible by tensor parallel size (4).",
            "generator.vllm.tensor_parallel = 4 does not divide the model's 14 attention heads",
        ),
        (
            "Model architectures ['OtherModel'] are not supported for now. Supported",
            "does not support the architecture OtherModel",
        ),
        ("OSError: [Errno 98] Address already in use", "a port is taken"),
    ],
)
def test_vllms_errors_are_told_in_the_recipes_terms(text: str, expected: str) -> None:
    assert expected in str(explain(f"Traceback (most recent call last):\n  File ...\n{text}\n"))


def test_the_installed_vllm_words_its_errors_so() -> None:
    """The same messages, raised by vLLM's own checks."""
    from types import SimpleNamespace

    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory
    from vllm.v1.worker.utils import request_memory

    def explained(function: Callable[..., object], *arguments: object) -> str:
        with pytest.raises(ValueError) as error:
            function(*arguments)
        return str(explain(str(error.value)))

    assert "leave no memory for the KV cache" in explained(_check_enough_kv_cache_memory, 0, lambda: 1, 256, lambda _: 0)
    assert "one sequence of 256 tokens needs 2.0 GiB of KV cache; 1.0 GiB are left" in explained(
        _check_enough_kv_cache_memory, GIB, lambda: 2 * GIB, 256, lambda _: 100
    )
    snapshot = SimpleNamespace(total_memory=80 * GIB, free_memory=10 * GIB, device_="cuda:0")
    assert "10.0 of 80.0 GiB are free on cuda:0; generator.vllm.gpu_memory_utilization = 0.5 asks for 40.0 GiB" in explained(
        request_memory, snapshot, SimpleNamespace(gpu_memory_utilization=0.5)
    )


def test_other_errors_are_left_alone() -> None:
    assert explain("RuntimeError: something else") is None
    disturbed = "Error in memory profiling. Initial free memory 126.14 GiB, current free memory 135.33 GiB. This happens when"
    assert "126.14 GiB were free, then 135.33 GiB" in str(explain(disturbed))
    assert is_passing(disturbed)
    assert not is_passing("RuntimeError: something else")
