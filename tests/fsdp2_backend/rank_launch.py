"""What the server imports that ranks are forked from."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from rlcore_torchkit.testing.ranks import PRELOADED, launch

__all__ = ["launch", "once"]

Result = TypeVar("Result")


def once(function: Callable[..., Result]) -> Callable[..., Result]:
    """Call `function` once for the same arguments, and raise its error again, as `functools.cache` does not.

    Ranks that crash leave the file that they met at, and a second launch would wait there for ranks that are gone.
    """

    @cache
    def outcome(*arguments: object) -> tuple[Result | None, Exception | None]:
        try:
            return function(*arguments), None
        except Exception as error:
            return None, error

    def get(*arguments: object) -> Result:
        result, error = outcome(*arguments)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    return get


def collected(request: Any, test: str) -> list[Mapping[str, Any]]:
    """Return the parameters of the cases of a test of the requesting module that this session runs."""
    items = [item for item in request.session.items if item.path == request.path and item.originalname == test]
    return [item.callspec.params for item in items]


ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama")
PRELOADED += [
    *(f"transformers.models.{architecture}.modeling_{architecture}" for architecture in ARCHITECTURES),
    "fsdp2_context_parallel_cases",
    "fsdp2_decoder_cases",
    "fsdp2_experts_cases",
    "fsdp2_layout_cases",
    "fsdp2_load_cases",
    "fsdp2_lora_cases",
    "fsdp2_replay_cases",
    "fsdp2_two_rank_cases",
    "fsdp2_value_cases",
    "rlcore_megatron",
    "megatron_checkpoint_cases",
    "megatron_layout_cases",
    "megatron_lora_cases",
    "megatron_replay_cases",
    "megatron_value_cases",
    "megatron_weights_cases",
    "rank_launch_frozen",
]
# Nothing that imports vLLM, which replaces parts of torch.
