"""What the server imports that ranks are forked from."""

import gc
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rlcore_torchkit.testing.ranks import PRELOADED, launch

__all__ = ["launch", "launch_rows", "once", "run_rows"]

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


def run_rows(rows: Mapping[str, Callable[[], str | None]], file: Path, *, alone: bool = False) -> None:
    """Run the rows on this rank. Keep in `file` what went wrong in each, or an empty string, by its name.

    The first row that raises ends this rank, unless it is `alone`. Other ranks would wait for its part of a collective
    without end: `launch_rows` ends them.
    """
    results = dict.fromkeys(rows, "not run, since a row before it failed on one rank")
    if not rows:
        file.write_text("{}")
    failed = None
    for number, (name, run) in enumerate(rows.items()):
        try:
            results[name] = run() or ""
        except Exception as error:
            results[name], failed = traceback.format_exc(), error
        file.write_text(json.dumps(results))  # now, since another rank's failure ends this one
        if failed is not None and not alone:
            raise failed
        if number == 0:
            gc.freeze()  # closing a trainer collects garbage: what the first row imported and read need not be looked through


def launch_rows(function: Callable[..., None], arguments: tuple[Any, ...], files: Sequence[Path]) -> list[dict[str, str]]:
    """Call `function(rank, *arguments)`, which calls `run_rows`, on one rank for each file. Return each rank's results.

    Raises what the launch raised where no row failed: a rank died, or never came to its rows.
    """
    try:
        launch(function, arguments, len(files))
    except Exception:
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        if not any("Traceback" in text for result in results for text in result.values()):
            raise
        return results
    return [json.loads(file.read_text()) for file in files]


def collected(request: Any, test: str) -> list[Mapping[str, Any]]:
    """Return the parameters of the cases of a test of the requesting module that this session runs."""
    items = [item for item in request.session.items if item.path == request.path and item.originalname == test]
    return [item.callspec.params for item in items]


ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama")
PRELOADED += [
    "pyarrow.compute",
    "pandas",  # pyarrow imports it with its first array
    *(f"transformers.models.{architecture}.modeling_{architecture}" for architecture in ARCHITECTURES),
    "fsdp2_context_parallel_cases",
    "fsdp2_decoder_cases",
    "fsdp2_experts_cases",
    "fsdp2_image_cases",
    "fsdp2_layout_cases",
    "fsdp2_load_cases",
    "fsdp2_lora_cases",
    "fsdp2_optimizer_cases",
    "fsdp2_replay_cases",
    "fsdp2_together_cases",
    "fsdp2_two_rank_cases",
    "fsdp2_value_cases",
    "rlcore_megatron",
    "megatron_checkpoint_cases",
    "megatron_image_cases",
    "megatron_layout_cases",
    "megatron_lora_cases",
    "megatron_replay_cases",
    "megatron_value_cases",
    "megatron_weights_cases",
    "rank_launch_frozen",
]
# Nothing that imports vLLM, which replaces parts of torch.
