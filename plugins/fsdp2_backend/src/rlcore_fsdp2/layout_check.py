"""Checks that the parallel sizes divide the ranks and the model; imports no torch."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from attrs import evolve

from rlcore.spi import Problem
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.architectures.decoders import is_image_model, state_kinds
from rlcore_torchkit.architectures.dims import ModelDims

SECTION = "trainer.fsdp2"
SIZES = ("replicate", "context_parallel", "tensor_parallel", "expert_parallel")
UNDESCRIBED = {
    "context_parallel": "that all of its layers but attention treat tokens alone",
    "expert_parallel": "what its experts compute",
    "fp8": "which of its layers bear float8",
    "compile_layers": "that its layers compile",
}
"""Options that a model which no family describes cannot have, and what is not known of it."""
FLOAT8_MULTIPLE = 16
"""Float8 products need matrices whose sides are multiples of this."""


def layout_problems(
    config: Fsdp2Config, world_size: int, device: str, model: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """Refuse sizes that do not divide; `model` is config.json under Llama's keys, or None."""
    if config.fp8 and find_spec("torchao") is None:
        remedy = "pip install 'rlcore-fsdp2[fp8]', or set it to false"
        yield option_problem("fp8", "true without torchao", "torchao installed", remedy)
    yield from _rank_problems(config, world_size)
    dims = None if model is None else ModelDims.of(model)
    if dims is not None:
        yield from _model_problems(config, device, dims)


def reference_layout_problems(
    config: Fsdp2Config, world_size: int, device: str, model: Mapping[str, Any] | None
) -> Iterator[Problem]:
    """`layout_problems` of a frozen model in the policy's layout: ranks that share experts are nothing to one without."""
    dims = None if model is None else ModelDims.of(model)
    if dims is not None and not dims.num_experts:
        config = evolve(config, expert_parallel=1)
    yield from layout_problems(config, world_size, device, model)


def undescribed_problems(
    config: Fsdp2Config, model: Mapping[str, Any], class_name: str = "the model", *, has_plan: bool = True
) -> Iterator[Problem]:
    """Options that need what a family's description says, for a model that trains by its own class, and tensor parallelism
    where transformers has no plan of its layers that can be followed. `model` is the content of config.json."""
    if is_image_model(model):
        yield from _image_context_problems(config.context_parallel, model)
        config = evolve(config, context_parallel=1)
    if config.tensor_parallel > 1 and not has_plan:
        remedy = "transformers has no plan (base_model_tp_plan) of how its layers divide"
        yield option_problem("tensor_parallel", f"{config.tensor_parallel} for {class_name}", "1", remedy)
    for option, what in UNDESCRIBED.items():
        default = getattr(Fsdp2Config(), option)
        if getattr(config, option) != default:
            remedy = f"No description of its family says {what}"
            yield option_problem(option, f"{getattr(config, option)} for {class_name}".lower(), f"{default}".lower(), remedy)


def _image_context_problems(context: int, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse context ranks that do not divide the heads of a language model that reads images."""
    if context > 1 and (kinds := state_kinds(model)):
        found, remedy = f"{context} for layers of {', '.join(sorted(kinds))}", "Their states pass from token to token"
        yield option_problem("context_parallel", found, "1", remedy)
    key = "num_attention_heads"
    heads = (model.get("text_config") or model).get(key)
    if type(heads) is int and heads % context:
        found, remedy = f"context_parallel = {context} for {heads} attention heads ({key})", f"Choose one of {_divisors(heads)}"
        yield option_problem("context_parallel", found, f"a divisor of {heads}", remedy)


def _rank_problems(config: Fsdp2Config, world_size: int) -> Iterator[Problem]:
    sizes = {name: getattr(config, name) for name in SIZES[:3]}
    product = config.replicate * config.context_parallel * config.tensor_parallel
    if world_size % product:
        yield Problem(
            path=SECTION,
            found=" x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {product} on {world_size} rank(s)",
            expected=f"a divisor of {world_size}, the trainer's ranks",
            remedy="Lower one of them, or give the trainer more ranks",
        )
    elif (world_size // config.tensor_parallel // config.replicate) % config.expert_parallel:
        ranks = world_size // config.tensor_parallel // config.replicate
        expected = f"a divisor of {ranks}, the ranks that tensor_parallel and replicate leave"
        yield option_problem("expert_parallel", str(config.expert_parallel), expected)


def _model_problems(config: Fsdp2Config, device: str, dims: ModelDims) -> Iterator[Problem]:
    for option, divisor, key, name, count in _quantities(config, dims):
        if count % divisor:
            found, remedy = f"{option} = {divisor} for {count} {name} ({key})", f"Choose one of {_divisors(count)}"
            yield option_problem(option.split(" ")[0], found, f"a divisor of {count}", remedy)
    tensor, heads = config.tensor_parallel, dims.num_kv_heads
    if heads % tensor and tensor % heads:
        found = f"tensor_parallel = {tensor} for {heads} key heads (num_key_value_heads)"
        remedy = f"Choose one of {_divisors(heads)}, or a multiple of {heads}"
        yield option_problem("tensor_parallel", found, f"a divisor or a multiple of {heads}", remedy)
    if config.expert_parallel > 1 and not dims.num_experts:
        remedy = "Leave it out: it divides mixture-of-experts layers alone"
        yield option_problem("expert_parallel", f"{config.expert_parallel} for a model without experts", "1", remedy)
    if config.fp8 and device == "cuda":
        yield from _float8_problems(config, dims)


def _quantities(config: Fsdp2Config, dims: ModelDims) -> Iterator[tuple[str, int, str, str, int]]:
    """Yield the quantities that ranks divide: the options, the product of their sizes, the key of config.json, its meaning, its
    value."""
    tensor, context = config.tensor_parallel, config.context_parallel
    heads_option = "tensor_parallel" if context == 1 else "context_parallel x tensor_parallel"
    heads_option = heads_option if tensor > 1 else "context_parallel"
    yield heads_option, tensor * context, "num_attention_heads", "attention heads", dims.num_heads
    yield "tensor_parallel", tensor, "vocab_size", "tokens of the vocabulary", dims.vocab_size
    if dims.num_dense_layers:
        yield "tensor_parallel", tensor, "intermediate_size", "columns of the MLP", dims.intermediate_size
    if dims.num_experts and config.expert_parallel == 1:
        yield "tensor_parallel", tensor, "num_experts", "experts", dims.num_experts
    yield "expert_parallel", config.expert_parallel if dims.num_experts else 1, "num_experts", "experts", dims.num_experts


def _float8_problems(config: Fsdp2Config, dims: ModelDims) -> Iterator[Problem]:
    sides = {
        "hidden_size": dims.hidden_size,
        "num_key_value_heads · head_dim / tensor_parallel": max(1, dims.num_kv_heads // config.tensor_parallel) * dims.head_dim,
    }
    if dims.num_dense_layers:
        sides["intermediate_size / tensor_parallel"] = dims.intermediate_size // config.tensor_parallel
    for name, size in sides.items():
        if size % FLOAT8_MULTIPLE:
            expected = f"a multiple of {FLOAT8_MULTIPLE}, for float8"
            yield option_problem("fp8", f"true with {name} = {size}", expected, "Set it to false")


def _divisors(count: int) -> str:
    return ", ".join(str(size) for size in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64) if count % size == 0)


def option_problem(key: str, found: str, expected: str, remedy: str = "") -> Problem:
    """A problem with a key of `[trainer.fsdp2]`."""
    return Problem(path=f"{SECTION}.{key}", found=found, expected=expected, remedy=remedy)
