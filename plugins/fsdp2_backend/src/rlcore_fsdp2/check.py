"""What can be found wrong with the trainer's options and model before anything is allocated."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcore.spi import CheckContext, Problem
from rlcore.torchkit.models import check_model
from rlcore_fsdp2.config import Fsdp2Config, OptimizerConfig, ScheduleConfig
from rlcore_fsdp2.layout_check import SECTION, layout_problems

COMPILERS = ("g++", "clang++", "c++")
"""What torch.compile builds its kernels' launchers with."""


def check(context: CheckContext, config: Fsdp2Config) -> Sequence[Problem]:
    """All problems at once."""
    return [
        *_model_problems(context),
        *_optimizer_problems(config.optimizer),
        *_schedule_problems(config.schedule),
        *layout_problems(config, context.world_size, context.device, _model_config(context)),
        *_compiler_problems(config),
        *_range(f"{SECTION}.collective_timeout_s", config.collective_timeout_s, lambda value: value > 0, "more than 0"),
    ]


def _model_problems(context: CheckContext) -> Iterator[Problem]:
    if context.model.dtype == "float16":
        remedy = "Set model.dtype to bfloat16: gradients in float16 would need a loss scale"
        yield Problem(path="model.dtype", found="float16", expected="float32 or bfloat16", remedy=remedy)
    problems = check_model(context.model.path)
    yield from problems
    config = _model_config(context)
    if problems or config is None:
        return
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and limit < context.max_sequence_length:
        yield Problem(
            path=str(_config_file(context)),
            found=f"max_position_embeddings = {limit}",
            expected=f"at least {context.max_sequence_length}, the longest sequence of the recipe",
            remedy="Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or use a model for longer texts",
        )


def _config_file(context: CheckContext) -> Path:
    return Path(context.model.path).expanduser() / "config.json"


def _model_config(context: CheckContext) -> dict[str, Any] | None:
    """What config.json says; None where it cannot be had or read, which `check_model` reports."""
    try:
        content = json.loads(_config_file(context).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _compiler_problems(config: Fsdp2Config) -> Iterator[Problem]:
    if config.compile_layers and not any(map(shutil.which, COMPILERS)):
        yield Problem(
            path=f"{SECTION}.compile_layers",
            found="true, but no C++ compiler",
            expected=f"one of {', '.join(COMPILERS)} on the PATH",
            remedy="Install one, or set it to false",
        )


def _range(path: str, value: Any, is_right: Callable[[Any], bool], expected: str) -> Iterator[Problem]:
    if not is_right(value):
        yield Problem(path=path, found=str(value), expected=expected)


def _optimizer_problems(config: OptimizerConfig) -> Iterator[Problem]:
    path = f"{SECTION}.optimizer"
    yield from _range(f"{path}.learning_rate", config.learning_rate, lambda value: value > 0, "more than 0")
    for index, beta in enumerate(config.betas):
        yield from _range(f"{path}.betas[{index}]", beta, lambda value: 0 <= value < 1, "at least 0 and less than 1")
    yield from _range(f"{path}.eps", config.eps, lambda value: value > 0, "more than 0")
    yield from _range(f"{path}.weight_decay", config.weight_decay, lambda value: value >= 0, "at least 0")
    yield from _range(f"{path}.max_grad_norm", config.max_grad_norm, lambda value: value >= 0, "at least 0; 0.0 never clips")


def _schedule_problems(config: ScheduleConfig) -> Iterator[Problem]:
    path = f"{SECTION}.schedule"
    yield from _range(f"{path}.warmup_steps", config.warmup_steps, lambda value: value >= 0, "at least 0")
    ratio = config.min_learning_rate_ratio
    yield from _range(f"{path}.min_learning_rate_ratio", ratio, lambda value: 0 <= value <= 1, "from 0 to 1")
    if config.decay == "constant" and ratio != 0.0:
        yield Problem(
            path=f"{path}.min_learning_rate_ratio",
            found=f'{ratio} with decay = "constant"',
            expected="0.0, since nothing decays",
            remedy='Set decay to "linear" or "cosine"',
        )
