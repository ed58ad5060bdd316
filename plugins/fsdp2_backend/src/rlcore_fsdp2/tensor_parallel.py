"""Tensor and sequence parallelism: which part of each weight a rank holds, and where ranks exchange activations.

Weights are DTensors, in the plan of `parallelize_module`; modules compute on their local parts, with plain tensors. Each
attention and MLP takes the whole hidden states and returns this rank's part of a sum. With sequence parallelism a rank holds
an equal part of the tokens in between (arXiv:2205.05198). Shapes: T tokens, P ranks, H hidden size.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn import functional as F

from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.head.logprobs import HeadLogprobs
from rlcore_torchkit.head.values import has_value_head
from rlcore_torchkit.head.vocabulary_parallel import vocabulary_parallel_logprobs
from rlcore_torchkit.huggingface.models import architecture_of, dims_of

TOKENS = 1
"""The dimension of tokens in hidden states [1, T, H]."""


@frozen(kw_only=True)
class Exchange:
    """Exchanges hidden states between ranks before and after what they compute together."""

    mesh: DeviceMesh
    sequence_parallel: bool

    @property
    def _between(self) -> Placement:
        return Shard(TOKENS) if self.sequence_parallel else Replicate()

    def enter(self, states: Tensor) -> Tensor:
        """All tokens [1, T', H] on every rank; in the backward pass the ranks' gradients are added up."""
        shared = DTensor.from_local(states, self.mesh, [self._between], run_check=False)
        whole: Tensor = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole

    def leave(self, summand: Tensor) -> Tensor:
        """The sum over ranks of [1, T, H]: whole, or of T padded to T', a multiple of P, this rank's [1, T'/P, H]."""
        if self.sequence_parallel:
            summand = F.pad(summand, (0, 0, 0, -summand.shape[TOKENS] % self.mesh.size()))
        shared = DTensor.from_local(summand, self.mesh, [Partial()], run_check=False)
        total: Tensor = shared.redistribute(placements=[self._between]).to_local()
        return total


class LocalShards(ParallelStyle):
    """The module's parameters, by name, as DTensors of which it computes with the local part."""

    def __init__(self, parameters: Mapping[str, tuple[Placement, Placement]]) -> None:
        """`parameters`: where each parameter is, and where its gradient is when a rank has computed its part."""
        self.parameters = parameters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        held = {name: placements for name, placements in self.parameters.items() if module._parameters.get(name) is not None}
        for name, (placement, _) in held.items():
            whole: Any = module._parameters[name]
            part = distribute_tensor(whole.detach(), device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        gradients = tuple((name, gradient) for name, (_, gradient) in held.items())
        module.__class__ = _holding_class(type(module), gradients)
        return module


@cache
def _holding_class(base: type, gradients: tuple[tuple[str, Placement], ...]) -> type:
    """`base`, under its own name, with attributes that are local parts of the parameters."""
    return type(
        base.__name__, (base,), {name: property(partial(_local_part, name, placement)) for name, placement in gradients}
    )


def _local_part(name: str, gradient: Placement, module: nn.Module) -> Tensor:
    """The part to compute with; while FSDP has it sharded further, and looks for it by name, the parameter itself."""
    parameter: Any = module._parameters[name]
    if parameter.device_mesh.ndim > 1:
        return parameter  # type: ignore[no-any-return]
    part: Tensor = parameter.to_local(grad_placements=[gradient])
    return part


class Colwise(LocalShards):
    """A linear layer of which each rank computes some outputs."""

    def __init__(self) -> None:
        super().__init__({"weight": (Shard(0), Shard(0)), "bias": (Shard(0), Shard(0))})


class SharedColwise(LocalShards):
    """A linear layer of fewer heads than ranks: on every rank whole, which computes the one head that it shares with others."""

    def __init__(self, num_heads: int) -> None:
        super().__init__({"weight": (Replicate(), Partial()), "bias": (Replicate(), Partial())})
        self.num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        size = module._parameters["weight"].shape[0] // self.num_heads  # type: ignore[union-attr]
        head = device_mesh.get_local_rank() * self.num_heads // device_mesh.size()
        rows = slice(head * size, (head + 1) * size)
        held = [name for name in self.parameters if module._parameters.get(name) is not None]
        members = {name: property(partial(_rows_of_part, name, rows)) for name in held}
        module.__class__ = type(type(module).__name__, (type(module),), members)
        return module


def _rows_of_part(name: str, rows: slice, module: nn.Module) -> Tensor:
    part = _local_part(name, Partial(), module)
    return part if isinstance(part, DTensor) else part[rows]


class Rowwise(LocalShards):
    """A linear layer of which each rank reads some inputs, so that the outputs are summands; the first rank adds the bias."""

    def __init__(self) -> None:
        super().__init__({"weight": (Shard(1), Shard(1)), "bias": (Replicate(), Partial())})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if module._parameters["bias"] is not None:
            is_first = float(device_mesh.get_local_rank() == 0)
            module.__class__ = type(
                type(module).__name__, (type(module),), {"bias": property(partial(_bias_summand, is_first))}
            )
        return module


def _bias_summand(factor: float, module: nn.Module) -> Tensor:
    bias = _local_part("bias", Partial(), module)
    return bias if isinstance(bias, DTensor) else bias * factor


class Replicated(LocalShards):
    """A module that is on every rank; `summed` where a rank's gradient is a summand: of its tokens, its heads, its experts."""

    def __init__(self, *, summed: bool) -> None:
        super().__init__({"weight": (Replicate(), Partial() if summed else Replicate())})


class Experts(LocalShards):
    """Each rank holds some experts whole. All ranks see all tokens and choices, and the outputs are summands."""

    def __init__(self) -> None:
        super().__init__({"gate_up_proj": (Shard(0), Shard(0)), "down_proj": (Shard(0), Shard(0))})

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        num_experts = module.num_experts // device_mesh.size()
        first = num_experts * device_mesh.get_local_rank()
        module.num_experts = num_experts
        module._is_expert_parallel = True  # transformers then skips choices that are no expert's
        module.register_forward_pre_hook(partial(_renumber, first, num_experts))
        return super()._apply(module, device_mesh)


def _renumber(first: int, num_experts: int, module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:  # noqa: ARG001
    """Choices counted from this rank's first expert; `num_experts`, one past the last, for the other ranks' experts."""
    states, chosen, weights = inputs
    local = chosen - first
    return states, local.masked_fill((local < 0) | (local >= num_experts), num_experts), weights


class Vocabulary(LocalShards):
    """An embedding of which each rank holds some rows and returns zeros for the other tokens."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__({"weight": (Shard(0), Shard(0))})
        self.exchange = exchange

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        first = first_row(module.num_embeddings, device_mesh)
        module = super()._apply(module, device_mesh)
        module.forward = partial(_embed, module, first)
        module.register_forward_hook(lambda _, __, rows: self.exchange.leave(rows))
        return module


def first_row(num_rows: int, mesh: DeviceMesh) -> int:
    """The first of this rank's rows, as `Shard(0)` divides them."""
    return min(num_rows, -(-num_rows // mesh.size()) * mesh.get_local_rank())


def _embed(module: Any, first: int, tokens: Tensor) -> Tensor:
    weight = module.weight
    local = tokens - first
    elsewhere = (local < 0) | (local >= weight.shape[0])
    return F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0.0)


class Together(ParallelStyle):
    """A module that takes all tokens and whose output is a summand."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002
        module.register_forward_pre_hook(partial(_enter, self.exchange), with_kwargs=True)
        module.register_forward_hook(partial(_leave, self.exchange))
        return module


def _enter(exchange: Exchange, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:  # noqa: ARG001
    """MLPs take their input by place and compute the padding too; attention takes it by name and is told the tokens' number."""
    if inputs:
        return (exchange.enter(inputs[0]), *inputs[1:]), options
    cosines = options["position_embeddings"][0]
    states = exchange.enter(options["hidden_states"])[:, : cosines.shape[TOKENS]]
    return inputs, options | {"hidden_states": states}


def _leave(exchange: Exchange, module: nn.Module, inputs: Any, outputs: Any) -> Any:  # noqa: ARG001
    if isinstance(outputs, tuple):
        return exchange.leave(outputs[0]), *outputs[1:]
    return exchange.leave(outputs)


def parallelize(model: Any, mesh: DeviceMesh, *, sequence_parallel: bool, experts: bool) -> HeadLogprobs | None:
    """Divide a transformers causal language model, in place, over the one dimension of `mesh`; returns its head. A head of
    values is whole on every rank, and None is returned.

    Its decoder still returns whole hidden states [1, T', H], of which the first T tokens count and whose gradients are summed
    over ranks. `experts` says whether experts are divided here; if not, it is left to expert parallelism.
    """
    exchange = Exchange(mesh=mesh, sequence_parallel=sequence_parallel)
    family = architecture_of(model.config)
    modules = family.modules
    has_values, embedding = has_value_head(model), model.get_submodule(modules.embedding)
    head = model.score if has_values else model.get_submodule(modules.head)
    is_tied = head.weight is embedding.weight
    num_kv_heads = dims_of(model.config).num_kv_heads
    keys = SharedColwise(num_kv_heads) if num_kv_heads < mesh.size() else Colwise()
    for layer in modules.layers_of(model):
        parallelize_module(layer, mesh, _layer_plan(layer, family, exchange, keys, experts=experts), src_data_rank=None)
    plan: dict[str, ParallelStyle] = {
        modules.embedding: Vocabulary(exchange),
        modules.norm: Replicated(summed=sequence_parallel),
        **({"score": Replicated(summed=False)} if has_values else {modules.head: Colwise()}),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.get_submodule(modules.norm).register_forward_hook(lambda _, __, states: exchange.enter(states))
    if is_tied:
        head.register_parameter("weight", embedding._parameters["weight"])
    return None if has_values else partial(_head_logprobs, head, mesh)


def _layer_plan(
    layer: Any, family: Architecture, exchange: Exchange, keys: LocalShards, *, experts: bool
) -> dict[str, ParallelStyle]:
    summed, modules = exchange.sequence_parallel, family.modules
    plan: dict[str, ParallelStyle] = {
        **_adapter_plan(layer, family, keys),
        modules.input_norm: Replicated(summed=summed),
        modules.attention: Together(exchange),
        modules.query: Colwise(),
        modules.key: keys,
        modules.value: keys,
        modules.output: Rowwise(),
        **{name: Replicated(summed=True) for name in (modules.query_norm, modules.key_norm) if family.has_qk_norms},
        modules.mlp_norm: Replicated(summed=summed),
        modules.mlp: Together(exchange),
    }
    if modules.experts_of(layer) is None:
        gate, up, down = (f"{modules.mlp}.{name}" for name in (modules.gate, modules.up, modules.down))
        return plan | {gate: Colwise(), up: Colwise(), down: Rowwise()}
    return plan | {modules.router: Replicated(summed=True)} | ({modules.experts: Experts()} if experts else {})


def _adapter_plan(layer: Any, family: Architecture, keys: LocalShards) -> dict[str, ParallelStyle]:
    """Adapters: B is divided by outputs where its layer is, A by inputs; the gradients of the whole ones are summands."""
    modules, plan = family.modules, dict[str, ParallelStyle]()
    by_inputs = {modules.output, f"{modules.mlp}.{modules.down}"}
    for name, module in layer.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        is_rowwise = name in by_inputs
        plan[f"{name}.lora_A"] = Rowwise() if is_rowwise else Replicated(summed=True)
        by_outputs = keys if name in (modules.key, modules.value) else Colwise()
        plan[f"{name}.lora_B"] = Replicated(summed=True) if is_rowwise else by_outputs
    return plan


def _head_logprobs(head: nn.Linear, mesh: DeviceMesh, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """HeadLogprobs by the rows of the head that this rank holds when it is called."""
    first = first_row(head.out_features, mesh)
    return vocabulary_parallel_logprobs(hidden, head.weight, first=first, group=mesh.get_group(), **options)
