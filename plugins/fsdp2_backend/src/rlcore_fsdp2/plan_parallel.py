"""Tensor parallelism of decoders that no family describes, by the plan that transformers has for their classes.

A plan (`base_model_tp_plan` of a config) names linear layers that ranks divide by outputs or by inputs, and what lies between
two of these is computed in parts. Everything else is on every rank, whole, as are its gradients. Shapes: T tokens, P ranks.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from rlcore.spi import Problem
from rlcore_fsdp2.layout_check import option_problem
from rlcore_fsdp2.tensor_parallel import Colwise, Exchange, Experts, LocalShards, Replicated, Rowwise
from rlcore_torchkit.architectures.decoders import EXPERT_STYLES, layers_of, layout_plan

BY_OUTPUTS, BY_INPUTS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
EXPERT_WEIGHTS = {"gate_up_proj", "down_proj"}
"""The stacks of weights that experts have."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of each head between layers of which ranks have some heads: their gradients are sums over ranks."""


def plan_problems(model: Any, size: int) -> list[Problem]:
    """Refuse `size` ranks that cannot divide a model's layers as its class's plan says."""
    plan = layout_plan(model.config)
    if plan is None:
        return [_problem(size, type(model).__name__, "a class that transformers has a plan for (base_model_tp_plan)")]
    styles = _styles(model, plan)
    return [*_size_problems(model, styles, size), *_between_problems(model, styles, size)]


def parallelize_by_plan(model: Any, mesh: DeviceMesh) -> None:
    """Divide a transformers causal language model that `plan_problems` finds nothing wrong with, in place, over the one
    dimension of `mesh`. Its embedding and head stay whole."""
    plan = layout_plan(model.config)
    assert plan is not None
    styles = _styles(model, plan)
    exchange = Exchange(mesh=mesh, sequence_parallel=False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    applied: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        applied |= _adapter_styles(model, name, style) | {name: _STYLES[style](exchange)}
    applied |= {name: Replicated(summed=True) for name in _head_norms(model, styles)}
    parallelize_module(model, mesh, applied, src_data_rank=None)
    for module in model.modules():
        whole = [name for name, held in module._parameters.items() if held is not None and not isinstance(held, DTensor)]
        if whole:
            LocalShards(dict.fromkeys(whole, (Replicate(), Replicate())))._apply(module, mesh)
    if is_tied:
        head.register_parameter("weight", embedding._parameters["weight"])


def _styles(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each module of the layers that the plan names."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    found = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(f"{prefix}{pattern}").replace(r"\*", r"\d+"))
        names = [name for name, _ in model.named_modules() if expression.fullmatch(name)]
        found |= dict.fromkeys(names, style)
    inside = [name for name, style in found.items() if style in EXPERT_STYLES]
    layers = {id(module) for layer in layers_of(model) for module in layer.modules()}
    return {
        name: style
        for name, style in found.items()
        if id(model.get_submodule(name)) in layers and not any(name.startswith(f"{parent}.") for parent in inside)
    }


def _size_problems(model: Any, styles: Mapping[str, str], size: int) -> Iterator[Problem]:
    config = model.config
    if any(style == "colwise" and "attn" in name.rpartition(".")[0] for name, style in styles.items()):
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        for key, count in zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True):
            if count % size:
                yield _problem(size, f"{key} = {count}", "a divisor of it: ranks have whole heads of their own")
    seen = set()
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        role = re.sub(r"\d+", "*", name)
        count = {True: "out_features", False: "in_features"}.get(style in BY_OUTPUTS) if isinstance(module, nn.Linear) else None
        attribute = "num_experts" if style in EXPERT_STYLES else count
        if role in seen:
            continue
        if attribute is not None and getattr(module, attribute) % size:
            seen.add(role)
            yield _problem(size, f"{getattr(module, attribute)} {attribute} of {role}", "a divisor of it")
        held = {held for held, _ in module.named_parameters(recurse=False)}
        if style in EXPERT_STYLES and held != EXPERT_WEIGHTS:
            seen.add(role)
            expected = f"{', '.join(sorted(EXPERT_WEIGHTS))}, which ranks can divide, beside its base_model_tp_plan"
            yield _problem(size, f"{', '.join(sorted(held))} of {role}", expected)


def _between_problems(model: Any, styles: Mapping[str, str], size: int) -> Iterator[Problem]:
    """Parameters beside layers that ranks divide, of which the plan does not say what a rank would have."""
    norms, seen = set(_head_norms(model, styles)), set[str]()
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"):
        module = model.get_submodule(parent)
        owners = [""] if any(True for _ in module.parameters(recurse=False)) else []
        owners += [child for child, found in module.named_children() if any(True for _ in found.parameters())]
        for child in owners:
            name = f"{parent}.{child}".rstrip(".")
            role = re.sub(r"\d+", "*", name)
            if name not in styles and name not in norms and role not in seen and not _holds_styles(name, child, styles):
                seen.add(role)
                yield _problem(size, f"{role}, which the plan of {type(model).__name__} leaves out", "a plan for all beside it")


def _holds_styles(name: str, child: str, styles: Mapping[str, str]) -> bool:
    return bool(child) and any(each.startswith(f"{name}.") for each in styles)


def _head_norms(model: Any, styles: Mapping[str, str]) -> Iterator[str]:
    """Norms with one weight for each place in a head, beside layers of which ranks have some heads."""
    width = getattr(model.config, "head_dim", None)
    for name, style in styles.items():
        parent, _, role = name.rpartition(".")
        if style == "replicated_with_grad_allreduce":
            continue
        if style == "colwise" and role == "q_proj":
            attention = dict(model.get_submodule(parent).named_children())
            for norm in HEAD_NORMS:
                weight = getattr(attention.get(norm), "weight", None)
                if weight is not None and f"{parent}.{norm}" not in styles and tuple(weight.shape) == (width,):
                    yield f"{parent}.{norm}"


def _problem(size: int, found: str, expected: str) -> Problem:
    return option_problem("tensor_parallel", f"{size} for {found}", expected, "Set it to 1, or to another size")


def _adapter_styles(model: Any, name: str, style: str) -> dict[str, ParallelStyle]:
    """B is divided by outputs where its layer is, A by inputs; the gradients of the whole ones are sums over ranks."""
    if not hasattr(model.get_submodule(name), "lora_A"):
        return {}
    by_inputs = style in BY_INPUTS
    return {
        f"{name}.lora_A": Rowwise() if by_inputs else Replicated(summed=True),
        f"{name}.lora_B": Replicated(summed=True) if by_inputs else Colwise(),
    }


class _Alone(ParallelStyle):
    """A layer that ranks divide, with what they exchange before and after it."""

    def __init__(
        self, style: LocalShards, exchange: Exchange, *, before: Callable[..., Tensor], after: Callable[..., Tensor] | None
    ) -> None:
        self.style, self.exchange, self.before, self.after = style, exchange, before, after

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_enter, self.exchange, self.before))
        module = self.style._apply(module, device_mesh)
        if self.after is not None:
            after = self.after
            module.register_forward_hook(lambda _, __, output: after(self.exchange, output))
        return module


def _enter(exchange: Exchange, before: Callable[..., Tensor], _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """All inputs that have gradients: the states, and for experts the weights of those that a router has chosen."""
    return tuple(before(exchange, each) if torch.is_floating_point(each) else each for each in inputs)


def _placed(exchange: Exchange, part: Tensor, before: Placement, after: Placement) -> Tensor:
    shared = DTensor.from_local(part, exchange.mesh, [before], run_check=False)
    placed: Tensor = shared.redistribute(placements=[after]).to_local()
    return placed


def _gather(exchange: Exchange, part: Tensor) -> Tensor:
    """[..., O] from each rank's [..., O/P]; in the backward pass each rank takes its part of the gradient."""
    return _placed(exchange, part, Shard(part.ndim - 1), Replicate())


def _split(exchange: Exchange, whole: Tensor) -> Tensor:
    """This rank's [..., I/P] of [..., I]; in the backward pass the ranks' gradients are gathered."""
    return _placed(exchange, whole, Replicate(), Shard(whole.ndim - 1))


def _as_is(_: Exchange, states: Tensor) -> Tensor:
    return states


_STYLES: Mapping[str, Callable[[Exchange], ParallelStyle]] = {
    "colwise": lambda exchange: _Alone(Colwise(), exchange, before=Exchange.enter, after=None),
    "colwise_gather_output": lambda exchange: _Alone(Colwise(), exchange, before=Exchange.enter, after=_gather),
    "rowwise": lambda exchange: _Alone(Rowwise(), exchange, before=_as_is, after=Exchange.leave),
    "rowwise_split_input": lambda exchange: _Alone(Rowwise(), exchange, before=_split, after=Exchange.leave),
    "moe_tp_experts": lambda exchange: _Alone(Experts(), exchange, before=Exchange.enter, after=Exchange.leave),
    "replicated_with_grad_allreduce": lambda _: Replicated(summed=True),
}
