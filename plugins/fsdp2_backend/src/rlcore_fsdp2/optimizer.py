"""AdamW, Muon beside it, and the gradient's global norm."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.adamw import adamw

from rlcore.spi import MuonSpec, OptimizerSpec
from rlcore_fsdp2.export import Exported
from rlcore_fsdp2.muon_update import exchanges, update_divided, update_whole
from rlcore_fsdp2.sharding import held_part, local, num_copies
from rlcore_fsdp2.trained_parameters import TrainedParameter, trained_parameters
from rlcore_torchkit.optimizer.moments import Columns, decode, encode, row_parts
from rlcore_torchkit.optimizer.muon import momentum_update
from rlcore_torchkit.optimizer.one_pass import step_numbers, takes, update_in_one_pass
from rlcore_torchkit.optimizer.settings import NO_OVERRIDES, StepOverrides, TensorSettings

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's first and second moment, as torch.optim.AdamW names them."""
SCALE = "_scale"
"""The end of the name of a moment's scales, where its codes have 8 bits."""
MOMENTUM = "momentum_buffer"
"""Muon's running mean of the gradient, as torch.optim.Muon names it."""
STEP = "step"


class Optimizer:
    """AdamW and Muon over the parameters of a model that train, float32 or float64, in whatever parts ranks hold them."""

    def __init__(self, members: Sequence[TrainedParameter], spec: OptimizerSpec, device: torch.device) -> None:
        """`device` computes what ranks exchange, which the parameters' own does where they are on the host."""
        self._spec, self._muon_spec, self._device = spec, spec.muon or MuonSpec(), device
        self._members = {member.parameter: member for member in members}
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._members:
            parameter.grad = None

    @torch.no_grad()
    def step(self, share: float, overrides: StepOverrides = NO_OVERRIDES) -> None:
        """Update the parameters that have a gradient, with `share` of each one's peak learning rate."""
        eps = self._spec.eps if overrides.eps is None else overrides.eps
        groups: dict[TensorSettings, list[TrainedParameter]] = {}
        for parameter, member in self._members.items():
            if parameter.grad is not None:
                if parameter not in self.state:
                    self.begin(parameter)
                settings = member.settings.overridden(overrides)
                groups.setdefault(settings, []).append(member)
        for settings, members in groups.items():
            rate = share * settings.learning_rate
            if settings.method == "muon":
                self._muon_step([evolve(member, settings=settings) for member in members], rate)
            elif settings.eight_bit:
                for member in members:
                    self._eight_bit_step(member, settings, rate, eps)
            else:
                states = [self.state[member.parameter] for member in members]
                self._adamw_step(
                    settings,
                    rate,
                    eps,
                    [local(member.parameter) for member in members],
                    [local(member.parameter.grad) for member in members],
                    [[local(state[name]) for state in states] for name in MOMENTS],
                    [state[STEP] for state in states],
                )

    def kinds(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of a parameter's state, the number of steps left out."""
        settings = self._members[parameter].settings
        scales = [name + SCALE for name in MOMENTS] if settings.eight_bit else []
        return (MOMENTUM,) if settings.method == "muon" else (*MOMENTS, *scales)

    def begin(self, parameter: nn.Parameter, step: int = 0) -> None:
        """Give a parameter state of zeros, after so many steps."""
        dtype = torch.uint8 if self._members[parameter].settings.eight_bit else parameter.dtype
        self.state[parameter] = {STEP: torch.tensor(float(step), device=local(parameter).device)} | {
            kind: _zero_scales(parameter)
            if kind.endswith(SCALE)
            else torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format).detach()
            for kind in self.kinds(parameter)
        }

    def _muon_step(self, members: Sequence[TrainedParameter], rate: float) -> None:
        divided: dict[Any, list[TrainedParameter]] = {}
        for member in members:
            parameter = member.parameter
            if isinstance(parameter, DTensor) and exchanges(parameter):
                divided.setdefault(parameter.device_mesh, []).append(member)
            else:
                update_whole(member, self._momentum_update(member), rate, self._muon_spec, self._device)
        for several in divided.values():
            # Of matrices that are exchanged together each rank updates one: those of like size belong together.
            several.sort(key=lambda member: member.parameter.numel())
            update_divided(several, self._momentum_update, rate, self._muon_spec, self._device)

    def _momentum_update(self, member: TrainedParameter) -> Tensor:
        state = self.state[member.parameter]
        state[STEP] += 1
        return momentum_update(local(member.parameter.grad), local(state[MOMENTUM]), self._muon_spec)

    def _adamw_step(
        self,
        settings: TensorSettings,
        rate: float,
        eps: float,
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        """Update weights, moments and numbers of steps in place."""
        adamw(
            weights,
            gradients,
            *moments,
            [],
            steps,
            # The fused kernel serves CPU too, where it takes a quarter of the time of the plain one.
            fused=True,
            amsgrad=False,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            lr=rate,
            weight_decay=settings.weight_decay,
            eps=eps,
            maximize=False,
        )

    def _eight_bit_step(self, member: TrainedParameter, settings: TensorSettings, rate: float, eps: float) -> None:
        """AdamW's step with moments that are decoded for it, of a few rows at a time."""
        state, columns = self.state[member.parameter], _columns(member.parameter)
        weights, gradients = local(member.parameter), local(member.parameter.grad)
        kept = {name: (local(state[name]), local(state[name + SCALE]), name == MOMENTS[0]) for name in MOMENTS}
        if takes(columns, weights.device) and not _dims_of_columns(member.parameter):
            state[STEP] += 1
            numbers = step_numbers(settings, rate, eps, local(state[STEP]))
            codes, scales = ([values[i] for values in kept.values()] for i in range(2))
            update_in_one_pass(weights, None, gradients, codes, scales, numbers)
            return
        for rows in row_parts((*weights.shape[:-1], columns.width)):  # the same on ranks with other columns
            moments = [decode(codes[rows], scales[rows], columns, signed=signed) for codes, scales, signed in kept.values()]
            several = [[moment] for moment in moments]
            self._adamw_step(settings, rate, eps, [weights[rows]], [gradients[rows]], several, [state[STEP].clone()])
            for moment, (codes, scales, signed) in zip(moments, kept.values(), strict=True):
                shared = self._shared(member.parameter, columns.scales(moment))
                scales[rows].copy_(shared)
                codes[rows].copy_(encode(moment, shared, columns, signed=signed))
        state[STEP] += 1

    def _shared(self, parameter: nn.Parameter, scales: Tensor) -> Tensor:
        """The largest scale of each block, of all ranks that hold columns of it."""
        for dim in _dims_of_columns(parameter):
            on_device = scales.to(self._device)
            dist.all_reduce(on_device, dist.ReduceOp.MAX, group=parameter.device_mesh.get_group(dim))
            scales = on_device.to(scales.device)
        return scales


def make_optimizer(model: Any, exported: Sequence[Exported], spec: OptimizerSpec, device: torch.device) -> Optimizer:
    """The optimizer of the parameters of `model` that train. ConfigError where the settings do not fit them."""
    return Optimizer(trained_parameters(model, exported, spec), spec, device)


def _columns(parameter: Tensor) -> Columns:
    part = held_part("", parameter)
    return Columns(first=part.start[-1], stop=part.stop[-1], width=parameter.shape[-1])


def _dims_of_columns(parameter: Tensor) -> list[int]:
    """The dimensions of a parameter's mesh that divide its last dimension."""
    placements: Sequence[Any] = parameter.placements if isinstance(parameter, DTensor) else ()
    return [dim for dim, each in enumerate(placements) if isinstance(each, Shard) and each.dim == parameter.ndim - 1]


def _zero_scales(parameter: Tensor) -> Tensor:
    """float32 [..., K]: the scales of this rank's rows, those of all columns on every rank."""
    number = _columns(parameter).num_blocks
    part = local(parameter).detach()
    scales = part.new_zeros((*part.shape[:-1], number))
    if not isinstance(parameter, DTensor):
        return scales
    whole = (*parameter.shape[:-1], number)
    stride = torch.empty(whole, device="meta").stride()
    placements = list(parameter.placements)
    for dim in _dims_of_columns(parameter):
        placements[dim] = Replicate()
    return DTensor.from_local(scales, parameter.device_mesh, placements, run_check=False, shape=whole, stride=stride)


def local_norms(gradients: Iterable[Tensor]) -> Tensor:
    """float64 [P]: L2 norm of this rank's part of each gradient."""
    return torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients])).double()


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """float64 scalar: what this rank adds to the square of the global L2 norm; elements on several ranks are shared between."""
    squares = local_norms(gradients).square()
    copies = [num_copies(gradient) for gradient in gradients]
    if max(copies) > 1:
        squares = squares / torch.tensor(copies, device=squares.device)
    return squares.sum()


def clip(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients, in place, so that their global L2 norm, now `norm`, is at most `max_norm`; 0.0 leaves them."""
    if 0.0 < max_norm < norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / norm)
