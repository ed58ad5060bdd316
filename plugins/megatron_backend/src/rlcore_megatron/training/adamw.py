"""AdamW's step of shards whose tensors have settings of their own, with moments in float32 or in 8 bits."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.optim.adamw import adamw

from rlcore_megatron.training.masters import Span
from rlcore_megatron.training.shard_elements import Elements, ShardElements
from rlcore_megatron.training.shard_states import CODES, MOMENTS, SCALES, ShardStates
from rlcore_torchkit.optimizer.moments import Columns, decode, encode, row_parts
from rlcore_torchkit.optimizer.one_pass import step_numbers, takes, update_in_one_pass
from rlcore_torchkit.optimizer.settings import BLOCK, DECODED_ELEMENTS, NO_OVERRIDES, StepOverrides, TensorSettings


@frozen(kw_only=True, eq=False)
class Segment:
    """Consecutive elements of a shard with the same settings; of those with moments in 8 bits, the same columns of rows."""

    shard: ShardElements
    states: ShardStates
    settings: TensorSettings
    elements: Sequence[Elements]

    @property
    def first(self) -> int:
        return self.elements[0].first

    @property
    def beyond(self) -> int:
        return self.elements[-1].beyond

    def spans(self) -> list[Span]:
        """Return its elements, in parts where masters are joined."""
        return self.states.spans(self.shard.key, self.first, self.beyond)

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """Views [elements] of the state with these names."""
        state = self.states.make(self.shard.key)
        return [state[name][self.first : self.beyond] for name in names]

    def joins(self, other: Elements) -> bool:
        """Return whether the segment stays one with `other`, which follows it."""
        last = self.elements[-1]
        if other.settings != self.settings:
            return False
        is_whole_row = other.run.columns.stop - other.run.columns.start == self.shard.width
        return not self.settings.eight_bit or (is_whole_row and last.run.columns == other.run.columns)


class AdamW:
    """The step of all elements that AdamW trains on this rank; made and called on every rank of a pipeline stage."""

    def __init__(self, shards: Sequence[tuple[ShardElements, ShardStates]], eps: float, group: Any) -> None:
        segments = [segment for shard, states in shards for segment in _segments(shard, states)]
        self._eps = eps
        self._plain: dict[TensorSettings, list[Segment]] = defaultdict(list)
        for segment in segments:
            if not segment.settings.eight_bit:
                self._plain[segment.settings].append(segment)
        self._narrow = NarrowMoments([segment for segment in segments if segment.settings.eight_bit], eps, group)

    def step(self, share: float, num_steps: int, overrides: StepOverrides = NO_OVERRIDES) -> None:
        """Do step `num_steps`, counted from 1, with this share of the peak learning rates."""
        eps = self._eps if overrides.eps is None else overrides.eps
        for settings, segments in self._plain.items():
            for spans in _grouped(span for segment in segments for span in segment.spans()):
                with ExitStack() as stack:
                    masters = [stack.enter_context(span.masters()) for span in spans]
                    gradients = [span.gradients for span in spans]
                    moments = [[span.state[name][span.first : span.beyond] for span in spans] for name in MOMENTS]
                    update(settings.overridden(overrides), eps, share, num_steps, masters, gradients, *moments)
        self._narrow.step(share, num_steps, overrides)


class NarrowMoments:
    """The step of segments with moments in 8 bits, in which ranks agree on the scale of a block that they share."""

    def __init__(self, segments: Sequence[Segment], eps: float, group: Any) -> None:
        self._segments, self._eps, self._group = segments, eps, group
        self._shared = SharedBlocks([element for segment in segments for element in segment.elements], group)

    def step(self, share: float, num_steps: int, overrides: StepOverrides) -> None:
        """Do step `num_steps`, counted from 1."""
        eps = self._eps if overrides.eps is None else overrides.eps
        agreed, steps = self._agreed_scales(overrides), torch.tensor(num_steps, device=torch.cuda.current_device())
        for segment in self._segments:
            settings = segment.settings.overridden(overrides)
            whole = _Rows.whole(segment)
            if takes(whole.columns, steps.device):
                numbers = step_numbers(settings, settings.learning_rate * share, eps, steps, whole.span.factor)
                whole.update(numbers)
                continue
            for rows in _Rows.of(segment):
                means, squares = rows.moments()
                with rows.span.masters() as masters:
                    flat = [masters], [rows.span.gradients], [means.view(-1)], [squares.view(-1)]
                    update(settings, eps, share, num_steps, *flat)
                scales = [rows.columns.scales(moment) for moment in (means, squares)]
                for row, block, place in self._shared.of(rows):
                    for number, of_moment in enumerate(scales):
                        of_moment[row, block] = agreed[number, place]
                rows.keep((means, squares), scales)

    def _agreed_scales(self, overrides: StepOverrides) -> Tensor:
        """float32 [2, shared blocks]: the scale of each block that several ranks hold a part of, of both moments."""
        scales = torch.zeros(2, self._shared.count, device=torch.cuda.current_device())
        if not self._shared.count:
            return scales
        for segment in self._segments:
            for rows in _Rows.of(segment):
                found = list(self._shared.of(rows))
                if not found:
                    continue
                beta, beta_of_squares = segment.settings.overridden(overrides).betas
                means, squares = rows.moments()
                gradients = rows.span.gradients.view_as(means)
                means.lerp_(gradients, 1 - beta)
                squares.mul_(beta_of_squares).addcmul_(gradients, gradients, value=1 - beta_of_squares)
                for number, moment in enumerate((means, squares)):
                    own = rows.columns.scales(moment)
                    for row, block, place in found:
                        scales[number, place] = torch.maximum(scales[number, place], own[row, block])
        dist.all_reduce(scales, dist.ReduceOp.MAX, self._group)
        return scales


class SharedBlocks:
    """Numbers of the blocks that end where a rank's columns do not: other ranks hold the rest of them."""

    def __init__(self, elements: Sequence[Elements], group: Any) -> None:
        everyone: list[dict[tuple[str, int], tuple[int, int]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everyone, _row_bounds(elements), group=group)
        bounds: dict[tuple[str, int], tuple[int, int]] = {}
        for name, (first, beyond) in (item for found in everyone for item in found.items()):
            low, high = bounds.get(name, (first, beyond))
            bounds[name] = min(low, first), max(high, beyond)
        self._begin, self.count = dict[tuple[str, int], int](), 0
        for name in sorted(bounds):
            first, beyond = bounds[name]
            self._begin[name] = self.count - first
            self.count += beyond - first

    def of(self, rows: "_Rows") -> Iterator[tuple[slice, int, slice]]:
        """Yield rows of a part, a block that other ranks share, and the place of these rows among all shared blocks."""
        for element in rows.segment.elements:
            run, offset = element.run, (element.first - rows.segment.first) // rows.width - rows.first
            low, high = max(offset, 0), min(offset + run.rows.stop - run.rows.start, rows.beyond - rows.first)
            if low < high:
                for block in _cut_blocks(element):
                    place = self._begin[run.tensor.name, block] + run.rows.start - offset
                    yield slice(low, high), block, slice(place + low, place + high)


@frozen(kw_only=True, eq=False)
class _Rows:
    """Rows `first` to `beyond` - 1 of a segment with moments in 8 bits."""

    segment: Segment
    first: int
    beyond: int
    width: int
    columns: Columns

    @classmethod
    def whole(cls, segment: Segment) -> "_Rows":
        """Return all rows of a segment."""
        own = segment.elements[0].run.columns
        columns = Columns(first=own.start, stop=own.stop, width=segment.shard.whole_width)
        width = own.stop - own.start
        return cls(segment=segment, first=0, beyond=(segment.beyond - segment.first) // width, width=width, columns=columns)

    @classmethod
    def of(cls, segment: Segment) -> "Iterator[_Rows]":
        """Yield the rows of a segment, a few at a time."""
        whole = cls.whole(segment)
        for (rows,) in row_parts((whole.beyond, whole.width)):
            yield evolve(whole, first=rows.start, beyond=rows.stop)

    @property
    def span(self) -> Span:
        """The elements of these rows, [R · C]."""
        segment = self.segment
        first, beyond = segment.first + self.first * self.width, segment.first + self.beyond * self.width
        return Span(key=segment.shard.key, state=segment.states.make(segment.shard.key), first=first, beyond=beyond)

    def update(self, numbers: Tensor) -> None:
        """Do AdamW's step of whole blocks with the numbers of `step_numbers`."""
        span, (codes, scales), shape = self.span, self._state(), (-1, self.width)
        remainders = None if span.remainders is None else span.remainders.view(shape)
        kept = [one[:, self.columns.blocks] for one in scales]
        update_in_one_pass(span.weights.view(shape), remainders, span.kept_gradients.view(shape), codes, kept, numbers)

    def moments(self) -> tuple[Tensor, Tensor]:
        """float32 [R, C], copies."""
        decoded = [
            decode(codes, scales, self.columns, signed=signed)
            for codes, scales, signed in zip(*self._state(), (True, False), strict=True)
        ]
        return decoded[0], decoded[1]

    def keep(self, moments: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """Put moments [R, C] into the state, with scales [R, K], of which those of other columns' blocks stay."""
        for moment, scale, codes, kept, signed in zip(moments, scales, *self._state(), (True, False), strict=True):
            codes.copy_(encode(moment, scale, self.columns, signed=signed))
            kept[:, self.columns.blocks] = scale[:, self.columns.blocks]

    def _state(self) -> tuple[list[Tensor], list[Tensor]]:
        codes = [self._taken(view) for view in self.segment.state(CODES)]
        state = self.segment.states.make(self.segment.shard.key)
        begin = self.segment.shard.row(self.segment.first)
        return codes, [state[name][begin + self.first : begin + self.beyond] for name in SCALES]

    def _taken(self, elements: Tensor) -> Tensor:
        return elements.view(-1, self.width)[self.first : self.beyond]


def _grouped(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield spans that are updated at once: those of float32 weights, and of others at most DECODED_ELEMENTS."""
    found: list[Span] = []
    joined = 0
    for span in spans:
        size = 0 if span.key.dtype == torch.float32 else span.beyond - span.first
        if found and joined + size > DECODED_ELEMENTS:
            yield found
            found, joined = [], 0
        found.append(span)
        joined += size
    if found:
        yield found


def update(
    settings: TensorSettings,
    eps: float,
    share: float,
    num_steps: int,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
) -> None:
    """Do AdamW's step `num_steps` of these tensors, in place, by kernels that copy nothing."""
    adamw(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(torch.full((len(weights),), float(num_steps - 1), device=weights[0].device).unbind()),
        fused=True,
        amsgrad=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=settings.learning_rate * share,
        weight_decay=settings.weight_decay,
        eps=eps,
        maximize=False,
    )


def _segments(shard: ShardElements, states: ShardStates) -> list[Segment]:
    found: list[Segment] = []
    for element in shard.elements:
        if element.settings.method != "adamw":
            continue
        joined = found and found[-1].beyond == element.first and found[-1].joins(element)
        elements = [*found.pop().elements, element] if joined else [element]
        found.append(Segment(shard=shard, states=states, settings=element.settings, elements=elements))
    return found


def _cut_blocks(element: Elements) -> set[int]:
    """The blocks that other ranks hold a part of."""
    columns, width = element.run.columns, prod(element.run.tensor.shape[1:])
    first = {columns.start // BLOCK} if columns.start % BLOCK else set[int]()
    return first | ({columns.stop // BLOCK} if columns.stop % BLOCK and columns.stop != width else set[int]())


def _row_bounds(elements: Sequence[Elements]) -> Mapping[tuple[str, int], tuple[int, int]]:
    """The first row, and the one beyond the last, of each tensor's block that is cut."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for element in elements:
        for block in _cut_blocks(element):
            rows, name = element.run.rows, (element.run.tensor.name, block)
            low, high = found.get(name, (rows.start, rows.stop))
            found[name] = min(low, rows.start), max(high, rows.stop)
    return found
