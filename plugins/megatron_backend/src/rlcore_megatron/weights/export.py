"""The policy's full tensors under Hugging Face's names, from any layout, gathered in few collectives while others are used."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from rlcore.spi import DtypeName, ExportWeightsRequest, TensorSpec, WeightBucket, WeightExport
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.parallel import Groups
from rlcore_megatron.weights.parameter_rows import row_ranges, rows_per_group, tensor_rank_and_size
from rlcore_megatron.weights.shards import Exported, Part, parts_of, reader
from rlcore_torchkit.refit.digest import make_buckets
from rlcore_torchkit.refit.shard_sender import ShardSender

Collective = Generator[dist.Work | None, None, list[Tensor]]
"""Yields after each collective that it has started, None for one of other ranks; all ranks start the same ones in one order."""


@frozen(kw_only=True, eq=False)
class _Held:
    """A parameter that this rank holds, as `rows_of` divides it."""

    parameter: Tensor
    adapters: Any
    """The adapters that are merged into it; None where none are."""
    groups: int
    rows: list[int]
    """The number of rows of each of its source's tensors in each group."""


class Exporter:
    """Streams the weights of a rank's model chunks; every rank of the trainer iterates, and gets every tensor."""

    def __init__(
        self, model_chunks: Sequence[Any], names: Names, layout: ParallelLayout, groups: Groups, *, merges: bool = True
    ) -> None:
        """`model_chunks` as `model.build` makes them, wrapped afterwards or not. Weights are exported with their adapters
        merged in, unless `merges` is False; where `names` are those of adapters, these alone, and scaled for a generator."""
        self._merges = merges
        self._model_chunks, self._layout, self._groups = model_chunks, layout, groups
        self._sources = [names.of_model_chunk(chunk, layout.expert_rank, layout.expert) for chunk in model_chunks]
        self._items = self._make_items(names)
        self._parameters = self._find_parameters()
        self._specs: dict[DtypeName, tuple[TensorSpec, ...]] = {}
        self._device = next(parameter.device for chunk in model_chunks for parameter in chunk.parameters())
        self.stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def names_of(self, model_chunk: int) -> Mapping[str, tuple[str, ...]]:
        """Hugging Face's names of the tensors in each parameter of one of the model chunks."""
        return {name: tuple(tensor.name for tensor in source.tensors) for name, source in self._sources[model_chunk].items()}

    def export(self, request: ExportWeightsRequest) -> WeightExport:
        """Tensors are on the trainer's device, valid until the next bucket is asked for.

        They are cast before they are gathered, so that less travels. While a bucket is used the next is being gathered.
        """
        return WeightExport(
            weight_version=request.weight_version,
            specs=self.specs(request.dtype),
            buckets=self._buckets(getattr(torch, request.dtype), request.max_bucket_bytes),
            persistent=False,  # the rows of queries, keys and values have to be put in order
        )

    def specs(self, dtype: DtypeName) -> tuple[TensorSpec, ...]:
        """All tensors in the order of the export, in this dtype but for those that have one of their own."""
        if dtype not in self._specs:
            self._specs[dtype] = tuple(
                TensorSpec(
                    name=name,
                    shape=first.tensor.file_shape,
                    dtype=first.tensor.dtype or dtype,
                    keeps_dtype=first.tensor.dtype is not None,
                )
                for name, (first, *_) in _by_tensor(self._items)
            )
        return self._specs[dtype]

    def sources_by_parameter(self) -> dict[int, Source]:
        """The source of each parameter of this rank by its identity. A tied one is there on the first stage that holds it."""
        return {
            id(self._parameters[item.parameter].parameter): item.source
            for item in self._items
            if item.parameter is not None and item.stage == self._layout.pipeline_rank
        }

    def parts(self) -> list[Part]:
        """Return the parts of the tensors that this rank holds."""
        return parts_of(self._items, self._layout, self._share)

    def _make_items(self, names: Names) -> list[Exported]:
        parameters = {
            source.parameter: (model_chunk, name)
            for model_chunk, sources in enumerate(self._sources)
            for name, source in sources.items()
        }
        stages = self._stages()
        by_name = {
            tensor.name: (source, index) for source in names.sources.values() for index, tensor in enumerate(source.tensors)
        }
        items = []
        for tensor in names.order:
            source, index = by_name[tensor.name]
            items.append(
                Exported(
                    tensor=tensor,
                    source=source,
                    index=index,
                    stage=stages[_key(source)],
                    expert_rank=None if source.expert is None else source.expert * self._layout.expert // names.num_experts,
                    parameter=parameters.get(source.parameter),
                )
            )
        return items

    def _stages(self) -> dict[int | str, int]:
        """The first stage that holds each layer, and each parameter outside of layers."""
        mine = list(dict.fromkeys(_key(source) for sources in self._sources for source in sources.values()))
        held: list[list[int | str]] = [mine]
        if self._layout.pipeline > 1:
            held = [[]] * self._layout.pipeline
            dist.all_gather_object(held, mine, group=self._groups.pipeline)
        return {key: stage for stage in reversed(range(len(held))) for key in held[stage]}

    def _buckets(self, dtype: torch.dtype, max_bytes: int) -> Iterator[WeightBucket]:
        current: _Fetch | None = None
        for items in _cut(self._items, dtype.itemsize, max_bytes):
            following = self.start_fetch(items, dtype)
            if current is not None:
                yield from current.buckets(max_bytes)
            current = following
        if current is not None:
            yield from current.buckets(max_bytes)

    def start_fetch(self, items: Sequence[Exported], dtype: torch.dtype) -> "_Fetch":
        collectives = []
        for (stage, expert_rank, own), segment in groupby(items, key=lambda item: item.sender):
            collectives.append(self._collect(list(segment), getattr(torch, own) if own else dtype, (stage, expert_rank)))
        return _Fetch([item.tensor for item in items], collectives, self.stream)

    def _collect(self, items: list[Exported], dtype: torch.dtype, sender: tuple[int, int | None]) -> Collective:
        """The full tensors of items that one pipeline and expert rank sends, or as many as there are tensor ranks."""
        layout, (stage, expert_rank) = self._layout, sender
        _, size = tensor_rank_and_size(items[0].source, layout)
        is_sent = layout.pipeline > 1 or (expert_rank is not None and layout.expert > 1)
        if not is_sent and size == 1:
            return [self._share(item).to(self._device, dtype).reshape(item.tensor.shape) for item in items]
        shares = self._flat(items, dtype, size)
        is_sender_of_experts = expert_rank in (None, layout.expert_rank)
        if layout.pipeline > 1:
            group = self._groups.pipeline
            yield dist.broadcast(shares, group=group, group_src=stage, async_op=True) if is_sender_of_experts else None
        if expert_rank is not None and layout.expert > 1:
            yield dist.broadcast(shares, group=self._groups.expert, group_src=expert_rank, async_op=True)
        if size == 1:
            return list(_unflattened(shares, items, size))
        everyones = shares.new_empty(size * len(shares))
        group = self._groups.tensor if expert_rank is None else self._groups.expert_tensor
        yield dist.all_gather_into_tensor(everyones, shares, group=group, async_op=True)
        return list(_joined(everyones.view(size, -1), items))

    def _flat(self, items: Sequence[Exported], dtype: torch.dtype, size: int) -> Tensor:
        """[elements] this rank's shares of the items, one after the other; not set where it has none."""
        layout = self._layout
        flat = torch.empty(sum(prod(item.sent_shape(size)) for item in items), dtype=dtype, device=self._device)
        if items[0].stage == layout.pipeline_rank and items[0].expert_rank in (None, layout.expert_rank):
            for item, part in zip(items, _unflattened(flat, items, size), strict=True):
                share = self._share(item)
                part[: share.shape[0] * share.shape[1]].view(share.shape).copy_(share)
        return flat

    def _find_parameters(self) -> dict[tuple[int, str], _Held]:
        """Return this rank's parameters, found once: to look each up for every tensor would cost more than copying a small
        expert."""
        found: dict[tuple[int, str], _Held] = {}
        for item in self._items:
            if item.parameter is not None and item.parameter not in found:
                number, name = item.parameter
                model = self._model_chunks[number]
                rank, size = tensor_rank_and_size(item.source, self._layout)
                found[item.parameter] = _Held(
                    parameter=model.get_parameter(name),
                    adapters=getattr(model, "adapters", None) if self._merges else None,
                    groups=item.source.local_groups(size),
                    rows=rows_per_group(item.source, rank, size),
                )
        return found

    def _share(self, item: Exported) -> Tensor:
        """[groups, rows, …] of the parameter, a view, or with an adapter merged in."""
        assert item.parameter is not None
        held = self._parameters[item.parameter]
        parameter = held.parameter.detach()
        grouped = parameter.view(held.groups, -1, *parameter.shape[1:])
        share = grouped.narrow(1, sum(held.rows[: item.index]), held.rows[item.index])
        return share if held.adapters is None else held.adapters.merged(item.tensor.name, share)


def one_after_the_other(first: WeightExport, second: WeightExport) -> WeightExport:
    """Both exports of one version as one, of which nothing stays valid."""
    return evolve(first, specs=(*first.specs, *second.specs), buckets=chain(first.buckets, second.buckets), persistent=False)


def shard(exporters: Sequence[Exporter], request: ExportWeightsRequest, sender: ShardSender) -> WeightExport:
    """The tensors of all of these, of which each rank sends the parts that it holds."""
    specs = tuple(spec for exporter in exporters for spec in exporter.specs(request.dtype))
    parts = [part for exporter in exporters for part in exporter.parts()]
    held = [part.box for part in parts]
    return sender.export(request, specs, held, reader(parts))


class _Fetch:
    """A bucket's tensors on their way."""

    def __init__(
        self, tensors: Sequence[HfTensor], collectives: Sequence[Collective], stream: torch.cuda.Stream | None
    ) -> None:
        """Queue everything on `stream` of a GPU, without waiting; elsewhere start the first collectives."""
        self._tensors, self._running, self._done = tensors, [_Running(collective) for collective in collectives], None
        if stream is None:
            for running in self._running:
                running.advance()
            return
        # Also frees memory for it: whatever used the tensors of the bucket before last has been queued by now.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for running in self._running:
                running.finish()
            self._done = stream.record_event()

    def buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """One, or for a tensor that is larger that alone."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        values = [value for running in self._running for value in running.finish()]
        self._running.clear()
        yield from make_buckets(_stacked(list(zip(self._tensors, values, strict=True))), max_bytes)


def _stacked(found: Sequence[tuple[HfTensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor, those that hold several made of their parts."""
    for name, pairs in groupby(found, key=lambda pair: pair[0].file_name):
        whole = None
        for tensor, value in pairs:
            if tensor.place is None:
                whole = value
                continue
            whole = value.new_empty(tensor.place.shape) if whole is None else whole
            rows = tensor.place.taken(whole[tuple(tensor.place.bounds(slice(0, len(value)), tensor.columns()))])
            rows.copy_(value.reshape(rows.shape))
        assert whole is not None
        yield name, whole


class _Running:
    """Collectives that follow on each other."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._work: dist.Work | None = None
        self._tensors: list[Tensor] | None = None

    def advance(self) -> None:
        """Start the next collective after the last, or take the results."""
        if self._work is not None:
            self._work.wait()  # on a GPU the stream waits, not the host
        try:
            self._work = next(self._collective)
        except StopIteration as end:
            self._work, self._tensors = None, end.value

    def finish(self) -> list[Tensor]:
        while self._tensors is None:
            self.advance()
        return self._tensors


def _key(source: Source) -> int | str:
    """Return the key of the stage: sources with one key are on one stage."""
    return source.parameter if source.layer is None else source.layer


def _cut(items: Sequence[Exported], item_bytes: int, max_bytes: int) -> Iterator[list[Exported]]:
    """Runs of tensors of at most so many bytes; a tensor that is larger comes alone."""
    run: list[Exported] = []
    num_bytes = 0
    for _, parts in _by_tensor(items):
        size = sum(prod(item.tensor.shape) for item in parts) * item_bytes
        if run and num_bytes + size > max_bytes:
            yield run
            run, num_bytes = [], 0
        run += parts
        num_bytes += size
    yield run


def _by_tensor(items: Sequence[Exported]) -> Iterator[tuple[str, list[Exported]]]:
    """The items of each tensor of the files, by its name."""
    for name, parts in groupby(items, key=lambda item: item.tensor.file_name):
        yield name, list(parts)


def _unflattened(flat: Tensor, items: Sequence[Exported], size: int) -> Iterator[Tensor]:
    """[elements of all shares] -> each share, a view."""
    shapes = [item.sent_shape(size) for item in items]
    for part, shape in zip(flat.split([prod(shape) for shape in shapes]), shapes, strict=True):
        yield part.view(shape)


def _joined(everyones: Tensor, items: Sequence[Exported]) -> Iterator[Tensor]:
    """[ranks, elements of all shares] -> each full tensor, a copy, so that nothing keeps the buffer."""
    size = len(everyones)
    shapes = [item.sent_shape(size) for item in items]
    for item, shape, parts in zip(items, shapes, everyones.split([prod(shape) for shape in shapes], 1), strict=True):
        if item.tensor.tp_dim is None:
            yield parts[0].view(shape).clone()
        elif item.source.splits_groups(size):
            ranges = [row_ranges(item.source, rank, size)[item.index] for rank in range(size)]
            whole = [part.view(shape)[: rows.stop - rows.start] for part, rows in zip(parts, ranges, strict=True)]
            yield torch.cat(whole)
        elif item.tensor.tp_dim == 0:
            yield parts.reshape(item.tensor.shape)
        else:
            yield parts.unflatten(1, shape).movedim(0, 1).reshape(item.tensor.shape)
