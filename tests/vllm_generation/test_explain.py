"""vLLM's errors in the recipe's terms."""

from collections.abc import Callable

import pytest

from rlcore_torchkit.distributed.format_bytes import GIB
from rlcore_vllm.engines.explain import explain, is_passing


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
    taken = "torch.distributed.DistNetworkError: EADDRINUSE"
    assert is_passing(taken)
    assert is_passing(f"vllm-0 ended: {explain(taken)}")
    assert not is_passing("RuntimeError: something else")
