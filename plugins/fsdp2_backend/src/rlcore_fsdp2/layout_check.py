"""Whether the parallel sizes divide the ranks and the model; imports no torch."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from attrs import frozen

from rlcore.spi import Problem
from rlcore_fsdp2.config import Fsdp2Config

SECTION = "trainer.fsdp2"
SIZES = ("replicate", "context_parallel", "tensor_parallel", "expert_parallel")
FLOAT8_MULTIPLE = 16
"""What float8 products want the sides of matrices to be multiples of."""


def layout_problems(
    config: Fsdp2Config, world_size: int, device: str, model: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """All that does not divide; `model` is its config, or None where that is not at hand yet."""
    if config.fp8 and find_spec("torchao") is None:
        remedy = "pip install 'rlcore-fsdp2[fp8]', or set it to false"
        yield Problem(path=f"{SECTION}.fp8", found="true without torchao", expected="torchao installed", remedy=remedy)
    yield from _rank_problems(config, world_size)
    if model is not None:
        # What the Hub's files call num_experts is num_local_experts in those that transformers 5 writes.
        yield from _model_problems(config, device, {"num_experts": model.get("num_local_experts"), **model})


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
        yield Problem(
            path=f"{SECTION}.expert_parallel",
            found=str(config.expert_parallel),
            expected=f"a divisor of {ranks}, the ranks that tensor_parallel and replicate leave",
        )


@frozen(kw_only=True)
class _Quantity:
    """A count of the model that ranks divide."""

    key: str
    name: str
    divisor: int
    option: str


def _model_problems(config: Fsdp2Config, device: str, model: Mapping[str, Any]) -> Iterator[Problem]:
    num_experts = model.get("num_experts") or 0
    for quantity in _quantities(config, model):
        count = model.get(quantity.key)
        if isinstance(count, int) and count % quantity.divisor:
            yield Problem(
                path=f"{SECTION}.{quantity.option.split(' ')[0]}",
                found=f"{quantity.option} = {quantity.divisor} for {count} {quantity.name} ({quantity.key})",
                expected=f"a divisor of {count}",
                remedy=f"Choose one of {', '.join(map(str, _divisors(count)))}",
            )
    if config.expert_parallel > 1 and not num_experts:
        yield Problem(
            path=f"{SECTION}.expert_parallel",
            found=f"{config.expert_parallel} for a model without experts",
            expected="1",
            remedy="Leave it out: it divides mixture-of-experts layers alone",
        )
    if config.fp8 and device == "cuda":
        yield from _float8_problems(config, model)


def _quantities(config: Fsdp2Config, model: Mapping[str, Any]) -> Iterator[_Quantity]:
    tensor, context = config.tensor_parallel, config.context_parallel
    heads_option = "tensor_parallel" if context == 1 else "context_parallel x tensor_parallel"
    heads_option = heads_option if tensor > 1 else "context_parallel"
    yield _Quantity(key="num_attention_heads", name="attention heads", divisor=tensor * context, option=heads_option)
    names = {"num_key_value_heads": "key heads", "vocab_size": "tokens of the vocabulary"}
    if not model.get("num_experts") or model.get("mlp_only_layers"):
        names["intermediate_size"] = "columns of the MLP"
    if model.get("num_experts") and config.expert_parallel == 1:
        names["num_experts"] = "experts"
    for key, name in names.items():
        yield _Quantity(key=key, name=name, divisor=tensor, option="tensor_parallel")
    if model.get("num_experts"):
        yield _Quantity(key="num_experts", name="experts", divisor=config.expert_parallel, option="expert_parallel")


def _float8_problems(config: Fsdp2Config, model: Mapping[str, Any]) -> Iterator[Problem]:
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    sides: dict[str, Any] = {"hidden_size": hidden}
    if not model.get("num_experts"):
        sides["intermediate_size / tensor_parallel"] = (model.get("intermediate_size") or 0) // config.tensor_parallel
    if hidden and heads:
        width = model.get("head_dim") or hidden // heads
        sides["num_key_value_heads · head_dim / tensor_parallel"] = (
            (model.get("num_key_value_heads") or heads) * width // config.tensor_parallel
        )
    for name, size in sides.items():
        if isinstance(size, int) and size % FLOAT8_MULTIPLE:
            expected = f"a multiple of {FLOAT8_MULTIPLE}, for float8"
            yield Problem(
                path=f"{SECTION}.fp8", found=f"true with {name} = {size}", expected=expected, remedy="Set it to false"
            )


def _divisors(count: int) -> list[int]:
    return [size for size in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64) if count % size == 0]
