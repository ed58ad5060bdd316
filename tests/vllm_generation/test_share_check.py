"""What an engine is given of a device is enough and is there, by the notes and problems that say otherwise."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import CheckContext, ModelSpec, Note
from rlcore_torchkit.distributed.format_bytes import GIB
from rlcore_vllm.checks import check as check_module
from rlcore_vllm.checks import share_check
from rlcore_vllm.checks.check import check
from rlcore_vllm.setup import settings
from rlcore_vllm.setup.config import VllmConfig

from .vllm_checked import Problems

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
def test_what_auto_is_beside_copies_of_weights_is_noted(checked: Path, monkeypatch, memories, share: float, why: str) -> None:
    for module in (check_module, share_check, settings):
        monkeypatch.setattr(module, "device_memories", lambda: memories)
    monkeypatch.setattr(check_module, "meant_for", lambda: {"cpu", "cuda"})
    spec = ModelSpec(path=str(checked))
    context = CheckContext(model=spec, device="cuda", world_size=1, max_sequence_length=64, channel="shards", delta="device")
    (note,) = check(context, VllmConfig(devices=(0,), max_num_seqs=2))
    assert isinstance(note, Note)
    assert f'"auto" is {share} of a device: engines have their devices to themselves' in note.text
    assert why in note.text


def test_a_device_that_something_else_is_on_is_noted(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_check, "free_memories", lambda: [79 * GIB, 30 * GIB])
    devices = {"device": "cuda", "devices": (0, 1), "replicas": 2, "memories": [80 * GIB] * 2}
    assert problems(**devices, gpu_memory_utilization=0.37) == []
    (note,) = problems(**devices, gpu_memory_utilization=0.4)
    assert isinstance(note, Note)
    assert note.text.startswith("0.4 of 80.0 GiB, of which 30.0 GiB are free at the moment: something else is on device 1")
    assert note.text.endswith("set at most 0.37")


@pytest.mark.parametrize(("channel", "remedy"), [("cuda_ipc", "offload.trainer"), ("nccl", "Set it to more than 0.66")])
def test_a_planned_share_that_is_too_small_names_who_has_the_rest(problems: Problems, channel: str, remedy: str) -> None:
    planned = {"planned": {"gpu_memory_utilization"}, "gpu_memory_utilization": 0.4}
    (problem,) = problems(device="cuda", config=LARGE, memories=[200 * GIB], channel=channel, **planned)
    assert problem.found.startswith('"auto", which is 0.4 of 200.0 GiB')
    assert remedy in problem.remedy


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
