"""Checks that the parallel sizes divide the ranks and the model; imports no torch."""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Literal

from attrs import evolve, frozen

from rlcore.spi import Problem
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.models import find_family
from rlcore_megatron.layouts.stages import layers_of_parts
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.requirements import (
    missing_delta_kernels,
    transformer_engine_version,
    uses_transformer_engine,
)
from rlcore_torchkit.architectures.dims import ModelDims

SECTION = "trainer.megatron"
AUTO_SIZES = ("tensor_parallel", "expert_parallel", "context_parallel", "pipeline_parallel")
"""Sizes that may be "auto"."""
SIZES = (*AUTO_SIZES, "expert_tensor_parallel", "virtual_pipeline_parallel")
FLOAT8_MULTIPLE = 16
"""Float8 products need matrices whose sides are multiples of this."""
LARGEST_NAMED = 64


def layout_problems(
    config: MegatronConfig,
    world_size: int,
    device: Literal["cpu", "cuda"],
    model: Mapping[str, Any] | None = None,
    family: MegatronFamily | Problem | None = None,
) -> list[Problem]:
    """Return a problem for each parallel size that does not divide the ranks or the model, and for each option that the model,
    the device or float8 rules out; "auto" counts as 1. `model` is its config, or None where that is not at hand yet. `family`
    is the model's, or None where it has to be found."""
    problems = [*_rank_problems(config, world_size), *_pipeline_problems(config, device), *_float8_problems(config, device)]
    dims = None if model is None else ModelDims.of(model)
    if dims is not None:
        problems += _model_problems(config, device, dims)
    if model is not None:
        problems += _feature_problems(config, find_family(model, "") if family is None else family)
    return problems


def reference_layout_problems(
    config: MegatronConfig,
    world_size: int,
    device: Literal["cpu", "cuda"],
    model: Mapping[str, Any] | None,
    family: MegatronFamily | Problem | None = None,
) -> list[Problem]:
    """`layout_problems` of a frozen model in the policy's layout: sizes that divide experts are nothing to one without."""
    dims = None if model is None else ModelDims.of(model)
    if dims is not None and not dims.num_experts:
        config = evolve(config, expert_parallel=1, expert_tensor_parallel=1)
    config = evolve(config, pipeline_layers="even")  # the list is of the policy's layers
    return layout_problems(config, world_size, device, model, family)


def family_option_problems(
    family: MegatronFamily, config: MegatronConfig, device: Literal["cpu", "cuda"], dtype: str, *, trains: bool
) -> Iterator[Problem]:
    """Options that a family rules out; `trains` says whether the model is one that does."""
    if family.has_all_biases and uses_transformer_engine(config, device, dtype):
        # Megatron's TEGroupedMLP adds the biases of the first layer in its fused gates alone, which this family's is not.
        found = "true" if config.transformer_engine else "nothing, which takes the one installed"
        remedy = "Megatron's grouped experts leave biases out, by which log-probabilities are wrong"
        yield option_problem("transformer_engine", f"{found}, with model_type {family.model_type}", "false", remedy)
    if family.has_delta_nets and device == "cuda" and (reason := missing_delta_kernels()):
        yield Problem(path="model.path", found=f"model_type {family.model_type}: {reason}", expected="its kernels installed")
    if family.has_delta_nets and config.pretrained_checkpoint:
        found = f"{config.pretrained_checkpoint}, with model_type {family.model_type}"
        remedy = "Megatron's checkpoints keep the weights of delta nets' norms minus one, which nothing tells from others"
        yield option_problem("pretrained_checkpoint", found, "no such key", remedy)
    if family.reads_images and config.pretrained_checkpoint:
        found = f"{config.pretrained_checkpoint}, with model_type {family.model_type}"
        remedy = "Megatron's checkpoints have another vision tower than transformers' own, which computes here"
        yield option_problem("pretrained_checkpoint", found, "no such key", remedy)
    if config.freeze == "vision" and trains and not family.reads_images:
        yield option_problem("freeze", f'"vision", for model_type {family.model_type}', '"none"', "It reads text alone")
    yield from _shared_index_problems(family, config)
    if family.has_all_biases and config.expert_tensor_parallel > 1:
        found = f"{config.expert_tensor_parallel}, with model_type {family.model_type}"
        yield option_problem("expert_tensor_parallel", found, "1: each rank would add the biases of its experts")
    if trains and family.has_correction_bias and "moe_aux_loss_coeff" in config.transformer:
        found = f"{config.transformer['moe_aux_loss_coeff']}, with model_type {family.model_type}"
        remedy = "Its routers are balanced by their biases, which stay as they are, and have no softmax to take a loss of"
        yield option_problem("transformer.moe_aux_loss_coeff", found, "no such key", remedy)


def invariant_size_problems(config: MegatronConfig, world_size: int) -> Iterator[Problem]:
    """Refuse ranks that share tokens, and other tensor ranks than one or the engine's, beside `batch_invariant`."""
    if world_size == 1:
        return
    tensor, parts = config.tensor_parallel, config.batch_invariant_parts
    if tensor not in (1, parts):
        expected = " or ".join(map(str, dict.fromkeys((1, parts))))
        remedy = "Or set batch_invariant_parts to generator.vllm.tensor_parallel"
        yield option_problem("tensor_parallel", f"{tensor}, with batch_invariant", expected, remedy)
    if config.context_parallel != 1:
        yield option_problem("context_parallel", f"{config.context_parallel}, with batch_invariant", "1")
    if tensor != 1 and config.sequence_parallel:
        yield option_problem("sequence_parallel", f"true, with batch_invariant and tensor_parallel {tensor}", "false")


def _shared_index_problems(family: MegatronFamily, config: MegatronConfig) -> Iterator[Problem]:
    """Parts of the pipeline that begin with a layer that takes another's keys."""
    if all(family.indexed) or config.pipeline_parallel == "auto":
        return
    bounds = accumulate(layers_of_parts(config, len(family.indexed)), initial=0)
    if wrong := [first for first in bounds if first < len(family.indexed) and not family.indexed[first]]:
        found = f"layers {', '.join(map(str, wrong))}, counted from 0, at the start of a stage or a part of one"
        expected = "layers with an indexer there: others take the keys of the layer before them, which is on another stage"
        yield option_problem("pipeline_parallel", found, expected, "Set pipeline_layers, or pipeline_parallel to 1")


def _feature_problems(config: MegatronConfig, family: MegatronFamily | Problem) -> Iterator[Problem]:
    """A first part of the pipeline without some of the layers that add a vision tower's features."""
    if isinstance(family, Problem) or not any(family.deepstack):
        return
    needed = sum(family.deepstack)
    found = layers_of_parts(evolve(config, pipeline_parallel=_size(config, "pipeline_parallel")), len(family.deepstack))[0]
    if found < needed:
        yield option_problem(
            "pipeline_parallel",
            f"a first part of {found} layers, with model_type {family.model_type}",
            f"at least {needed}: as many layers add features of the vision tower, which the first part alone has",
            "Set pipeline_layers, or lower pipeline_parallel or virtual_pipeline_parallel",
        )


def _rank_problems(config: MegatronConfig, world_size: int) -> Iterator[Problem]:
    for names in (
        ("tensor_parallel", "context_parallel", "pipeline_parallel"),
        ("expert_tensor_parallel", "expert_parallel", "pipeline_parallel"),
    ):
        sizes = [_size(config, name) for name in names]
        if world_size % math.prod(sizes):
            yield Problem(
                path=SECTION,
                found=" x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
                + f" = {math.prod(sizes)} on {world_size} rank(s)",
                expected=f"a divisor of {world_size}, the trainer's ranks",
                remedy="Lower one of them, or give the trainer more ranks",
            )


def _pipeline_problems(config: MegatronConfig, device: str) -> Iterator[Problem]:
    one_stage = config.pipeline_parallel == 1 or (config.pipeline_parallel == "auto" and device == "cpu")
    if config.virtual_pipeline_parallel > 1 and one_stage:
        yield option_problem(
            "virtual_pipeline_parallel",
            f"{config.virtual_pipeline_parallel} with pipeline_parallel 1",
            "1",
            "Raise pipeline_parallel: parts of a model take turns on several stages",
        )


@frozen(kw_only=True)
class _Quantity:
    """A count of the model that ranks divide."""

    count: int
    name: str
    options: tuple[str, ...]
    """The sizes whose product has to divide it."""
    note: str = ""


def _model_problems(config: MegatronConfig, device: str, dims: ModelDims) -> Iterator[Problem]:
    for quantity in _quantities(config, dims):
        sizes = {name: _size(config, name) for name in quantity.options if _size(config, name) > 1}
        if quantity.count % math.prod(sizes.values()):
            yield option_problem(
                next(iter(sizes)),
                f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} for {quantity.count} {quantity.name}",
                f"a divisor of {quantity.count}{quantity.note}",
                f"{'Choose one of' if len(sizes) == 1 else 'Let the product be one of'} {_divisors(quantity.count)}",
            )
    yield from _key_head_problems(config, dims)
    yield from _stage_problems(config, device, dims)
    if not dims.num_experts:
        for name in ("expert_parallel", "expert_tensor_parallel"):
            if _size(config, name) > 1:
                remedy = "Leave it out: it divides mixture-of-experts layers alone"
                yield option_problem(name, f"{_size(config, name)} for a model without experts", "1", remedy)
    elif _size(config, "tensor_parallel") > 1 and not config.sequence_parallel:
        yield option_problem(
            "sequence_parallel",
            f"false with tensor_parallel {config.tensor_parallel} for a model with {dims.num_experts} experts",
            "true: Megatron's routers train on tokens that tensor ranks divide",
            "Leave it out, or set tensor_parallel to 1",
        )
    elif device == "cpu":
        yield from _gathering_problems(config)
    if config.fp8:
        yield from _float8_side_problems(config, dims)


def _key_head_problems(config: MegatronConfig, dims: ModelDims) -> Iterator[Problem]:
    """Ranks have key heads of their own, or else equally many ranks share each: then these divide its query group by rows."""
    tensor, heads = _size(config, "tensor_parallel"), dims.num_kv_heads
    if heads % tensor and tensor % heads:
        expected, remedy = f"a divisor or a multiple of {heads}", f"Choose one of {_divisors(heads)}, or a multiple of {heads}"
        yield option_problem("tensor_parallel", f"tensor_parallel {tensor} for {heads} key heads", expected, remedy)
    elif tensor > heads and (reason := _whole_heads(dims)):
        found = f"tensor_parallel {tensor} for {heads} key heads"
        yield option_problem("tensor_parallel", found, f"at most {heads}: {reason}", f"Choose one of {_divisors(heads)}")
    elif tensor > heads and (rows := (dims.num_heads + 2 * heads) * dims.head_dim) % tensor:
        found = f"tensor_parallel {tensor} for {rows} rows of queries, keys and values"
        yield option_problem("tensor_parallel", found, f"a divisor of {rows}", f"Choose one of {_divisors(heads)}")


def _whole_heads(dims: ModelDims) -> str | None:
    """Name what keeps ranks from sharing a key head."""
    if dims.has_output_gates:
        return "ranks that share a key head would divide queries and gates in the middle of heads"
    return "norms over all heads would count a shared key head once for each rank" if dims.has_wide_norms else None


def _stage_problems(config: MegatronConfig, device: str, dims: ModelDims) -> Iterator[Problem]:
    sizes = {"pipeline_parallel": _size(config, "pipeline_parallel")}
    if config.virtual_pipeline_parallel > 1:
        sizes["virtual_pipeline_parallel"] = config.virtual_pipeline_parallel
    num_parts, product = math.prod(sizes.values()), " x ".join(f"{name} {size}" for name, size in sizes.items())
    if num_parts > dims.num_layers:
        yield option_problem(
            "pipeline_parallel",
            f"{product} for {dims.num_layers} layers",
            f"at most {dims.num_layers}: each part of a stage has a layer at least",
            "Lower one of them" if len(sizes) > 1 else "Lower it",
        )
    if config.pipeline_layers == "even":
        return
    told = sum(config.pipeline_layers)
    if (config.pipeline_parallel != "auto" or device == "cpu") and len(config.pipeline_layers) != num_parts:
        found = f"{len(config.pipeline_layers)} numbers with {product}"
        yield option_problem("pipeline_layers", found, f"{num_parts}, one for each part", 'Or set it to "even"')
    elif told != dims.num_layers:
        found = f"{' + '.join(map(str, config.pipeline_layers))} = {told} layers"
        yield option_problem("pipeline_layers", found, f"{dims.num_layers}, all of the model's", 'Or set it to "even"')


def _gathering_problems(config: MegatronConfig) -> Iterator[Problem]:
    """gloo gathers only tensors of equal size. Ranks that share an expert have equally many tokens only where they share those
    of one microbatch and send none to other experts' ranks."""
    shared, expert = config.expert_tensor_parallel, _size(config, "expert_parallel")
    tensor, context = _size(config, "tensor_parallel"), _size(config, "context_parallel")
    expected = "1: gloo gathers only tensors of equal size, and "
    if shared > 1 and expert > 1:
        found = f"{shared} with expert_parallel {expert} on a CPU"
        yield option_problem(
            "expert_tensor_parallel", found, f"{expected}experts receive unequal numbers of tokens", "Leave it out"
        )
    elif tensor * context % shared:
        found = f"{shared} with tensor_parallel {tensor} x context_parallel {context} on a CPU"
        remedy = f"Leave it out, or choose a divisor of {tensor * context}"
        yield option_problem(
            "expert_tensor_parallel", found, f"{expected}microbatches of data-parallel ranks differ in size", remedy
        )


def _quantities(config: MegatronConfig, dims: ModelDims) -> Iterator[_Quantity]:
    tensor = ("tensor_parallel",)
    yield _Quantity(count=dims.num_heads, name="attention heads", options=tensor)
    yield _Quantity(count=dims.vocab_size, name="tokens of the vocabulary", options=tensor)
    if dims.num_dense_layers:
        yield _Quantity(count=dims.intermediate_size, name="columns of the MLP", options=tensor)
    if dims.num_experts:
        yield _Quantity(count=dims.moe_intermediate_size, name="columns of an expert", options=("expert_tensor_parallel",))
        if dims.shared_intermediate_size:
            yield _Quantity(count=dims.shared_intermediate_size, name="columns of the shared expert", options=tensor)
        yield _Quantity(count=dims.num_experts, name="experts", options=("expert_parallel",))
    if dims.delta is not None:
        yield _Quantity(
            count=dims.delta.num_key_heads,
            name="key heads of gated delta nets",
            options=("tensor_parallel", "context_parallel"),
        )
    if _size(config, "context_parallel") > 1:
        yield _Quantity(
            count=dims.num_heads,
            name="attention heads",
            options=("context_parallel", "tensor_parallel"),
            note=": context ranks exchange their tokens for heads, of those that tensor_parallel leaves",
        )


def _float8_problems(config: MegatronConfig, device: str) -> Iterator[Problem]:
    if not config.fp8:
        return
    if device != "cuda":
        yield option_problem("fp8", f"true on {device}", "false", "Float8 needs a GPU")
    elif config.transformer_engine is False or (config.transformer_engine is None and transformer_engine_version() is None):
        found = "transformer_engine = false" if config.transformer_engine is False else "no TransformerEngine"
        remedy = "pip install --no-build-isolation 'transformer_engine[pytorch]', or set it to false"
        yield option_problem("fp8", f"true with {found}", "layers of TransformerEngine", remedy)


def _float8_side_problems(config: MegatronConfig, dims: ModelDims) -> Iterator[Problem]:
    tensor = _size(config, "tensor_parallel")
    sides = {"hidden_size": dims.hidden_size, **_attention_sides(dims, tensor)}
    if dims.num_dense_layers:
        sides["intermediate_size / tensor_parallel"] = dims.intermediate_size // tensor
    if dims.num_experts:
        sides["moe_intermediate_size / expert_tensor_parallel"] = dims.moe_intermediate_size // config.expert_tensor_parallel
        sides["the shared expert's columns / tensor_parallel"] = dims.shared_intermediate_size // tensor
    for name, size in sides.items():
        if size % FLOAT8_MULTIPLE:
            yield option_problem("fp8", f"true with {name} = {size}", f"a multiple of {FLOAT8_MULTIPLE}", "Set it to false")


def _attention_sides(dims: ModelDims, tensor: int) -> dict[str, int]:
    heads, latent = dims.num_heads // tensor, dims.latent
    if latent is None:
        sides = {"num_attention_heads · head_dim / tensor_parallel": dims.num_heads * dims.head_dim // tensor}
        if tensor > dims.num_kv_heads:
            rows = (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim
            return sides | {"(num_attention_heads + 2 · num_key_value_heads) · head_dim / tensor_parallel": rows // tensor}
        if dims.delta is not None:
            sides["the projection of gated delta nets / tensor_parallel"] = dims.delta.rows // tensor
        return sides | {"num_key_value_heads · head_dim / tensor_parallel": dims.num_kv_heads * dims.head_dim // tensor}
    queries = {} if latent.query_rank is None else {"q_lora_rank": latent.query_rank}
    return queries | {
        "kv_lora_rank": latent.key_rank,
        "kv_lora_rank + qk_rope_head_dim": latent.key_rank + latent.rotary_width,
        "num_attention_heads · (qk_nope_head_dim + qk_rope_head_dim) / tensor_parallel": heads * latent.key_width,
        "num_attention_heads · (qk_nope_head_dim + v_head_dim) / tensor_parallel": heads
        * (latent.plain_width + latent.value_width),
        "num_attention_heads · v_head_dim / tensor_parallel": heads * latent.value_width,
    }


def _size(config: MegatronConfig, name: str) -> int:
    size = getattr(config, name)
    return 1 if size == "auto" else int(size)


def _divisors(count: int) -> str:
    return ", ".join(str(size) for size in range(1, LARGEST_NAMED + 1) if count % size == 0)


def option_problem(key: str, found: object, expected: str, remedy: str = "") -> Problem:
    """A problem with a key of `[trainer.megatron]`."""
    return Problem(path=f"{SECTION}.{key}", found=str(found), expected=expected, remedy=remedy)
