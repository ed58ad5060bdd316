"""Cutting a step's data into what each rank gets, and putting together what comes back."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from attrs import evolve, frozen

from rlcore.execution import WIDTH, plan_ranks
from rlcore.spi import (
    ROUTED_EXPERTS,
    GenerateRequest,
    GenerateResult,
    Images,
    RaggedTokens,
    RoutedExperts,
    SamplingMask,
    TokenBatch,
)
from rlcore.spi.arrays import AnyArray, BoolArray, Float32Array, Int32Array, Int64Array, offsets_of, put_rows, take_rows
from rlcore.spi.execution import Responses


@frozen(kw_only=True, eq=False)
class RankPart:
    """The microbatches of one data-parallel rank, one after another in few large arrays, which travel without being copied."""

    tokens: Int32Array
    offsets: Int64Array
    loss_mask: BoolArray
    token_columns: Mapping[str, AnyArray]
    sequence_columns: Mapping[str, AnyArray]
    """The columns are those of a TokenBatch, but the offsets may begin after 0."""
    bounds: Int64Array
    """int64 [M+1]: microbatch m is the sequences bounds[m] to bounds[m+1]."""
    sampling_mask: SamplingMask | None
    images: Images | None

    @classmethod
    def of(cls, batch: TokenBatch, bounds: Int64Array) -> "RankPart":
        """Views of a batch; `bounds` are of its sequences."""
        sequences = slice(int(bounds[0]), int(bounds[-1]))
        offsets = batch.offsets[sequences.start : sequences.stop + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        return cls(
            tokens=batch.tokens[tokens],
            offsets=offsets,
            loss_mask=batch.loss_mask[tokens],
            token_columns={name: column[tokens] for name, column in batch.token_columns.items()},
            sequence_columns={name: column[sequences] for name, column in batch.sequence_columns.items()},
            bounds=bounds - bounds[0],
            sampling_mask=_part_of(batch.sampling_mask, tokens),
            images=None if batch.images is None else batch.images[sequences],
        )

    def microbatches(self, bounds: Int64Array | None = None) -> tuple[TokenBatch, ...]:
        """Return the microbatches of one rank as views, without a copy: all of them, or those with other bounds."""
        return tuple(
            self._microbatch(start, end) for start, end in pairwise((self.bounds if bounds is None else bounds).tolist())
        )

    def with_token_column(self, name: str, found: Sequence[AnyArray], first: int) -> "RankPart":
        """This part with one more column, given its values from microbatch number `first` on; 0 before."""
        num_before = int(self.offsets[self.bounds[first]] - self.offsets[0])
        column = np.concatenate([np.zeros(num_before, found[0].dtype), *found])
        return evolve(self, token_columns={**self.token_columns, name: column})

    def _microbatch(self, start: int, end: int) -> TokenBatch:
        offsets = self.offsets[start : end + 1]
        tokens = slice(int(offsets[0] - self.offsets[0]), int(offsets[-1] - self.offsets[0]))
        return TokenBatch(
            tokens=self.tokens[tokens],
            offsets=offsets - offsets[0],
            loss_mask=self.loss_mask[tokens],
            token_columns={name: column[tokens] for name, column in self.token_columns.items()},
            sequence_columns={name: column[start:end] for name, column in self.sequence_columns.items()},
            sampling_mask=_part_of(self.sampling_mask, tokens),
            images=None if self.images is None else self.images[start:end],
        )


def _part_of(mask: SamplingMask | None, tokens: slice) -> SamplingMask | None:
    return None if mask is None else mask.slice(tokens.start, tokens.stop)


@frozen(kw_only=True, eq=False)
class Dispatch:
    """The assignment of a batch's sequences to data-parallel ranks."""

    sequences: Int64Array
    """int64 [M]: of all microbatches, rank by rank. An empty microbatch has a sequence or a group all the same, which
    counts in no loss."""
    bounds: Int64Array
    """int64 [ranks · microbatches + 1]: microbatch m is sequences[bounds[m]:bounds[m+1]]."""
    fillers: Int64Array
    """int64: the places in `sequences` of those that count in no loss."""
    num_ranks: int

    @classmethod
    def of(
        cls,
        batch: TokenBatch,
        sequences: Int64Array,
        num_ranks: int,
        max_tokens: int,
        width: int = WIDTH,
        groups: Int64Array | None = None,
    ) -> "Dispatch":
        """Divide some of a batch's sequences, balanced by attention work for hidden size `width`; with `groups`, whole
        groups."""
        lengths = batch.lengths[sequences]
        plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens, width=width, groups=groups)
        parts = np.arange(len(sequences) + 1) if groups is None else groups
        least = int(np.add.reduceat(lengths, parts[:-1]).argmin())
        shortest = np.arange(parts[least], parts[least + 1])
        microbatches = [members for rank in plan for members in rank]
        filled = [members if len(members) else shortest for members in microbatches]
        bounds = offsets_of([len(members) for members in filled])
        return cls(
            sequences=sequences[np.concatenate(filled)],
            bounds=bounds,
            fillers=np.flatnonzero(np.repeat([len(members) == 0 for members in microbatches], np.diff(bounds))),
            num_ranks=num_ranks,
        )

    @classmethod
    def joined(cls, dispatches: "Sequence[Dispatch]") -> "Dispatch":
        """Join several: each rank gets its microbatches of the first one, then those of the second one, …"""
        pieces = [dispatch._piece(rank) for rank in range(dispatches[0].num_ranks) for dispatch in dispatches]
        sequences, sizes, are_fillers = (np.concatenate(found) for found in zip(*pieces, strict=True))
        return cls(
            sequences=sequences,
            bounds=offsets_of(sizes),
            fillers=np.flatnonzero(are_fillers),
            num_ranks=dispatches[0].num_ranks,
        )

    def _piece(self, rank: int) -> tuple[Int64Array, Int64Array, BoolArray]:
        """A rank's sequences, how many each of its microbatches has, and which of them are fillers."""
        bounds = self.bounds[rank * self.num_microbatches : (rank + 1) * self.num_microbatches + 1]
        numbers = np.arange(bounds[0], bounds[-1])
        return self.sequences[numbers], np.diff(bounds), np.isin(numbers, self.fillers)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of each rank."""
        return (len(self.bounds) - 1) // self.num_ranks

    def passes(self, lengths: Int64Array, max_tokens: int, first: int) -> Int64Array:
        """int64 [P+1]: which of a rank's microbatches, from number `first` on, may run as one where nothing is trained, given
        the length of each of the batch's sequences. Pass p is the microbatches passes[p] to passes[p+1]; it has no more than
        `max_tokens` on any rank, unless it is one microbatch."""
        num_tokens = np.add.reduceat(lengths[self.sequences], self.bounds[:-1]).reshape(self.num_ranks, -1)
        passes, together = [first], num_tokens[:, first]
        for number in range(first + 1, self.num_microbatches):
            together = together + num_tokens[:, number]
            if together.max() > max_tokens:
                passes.append(number)
                together = num_tokens[:, number]
        return np.array([*passes, self.num_microbatches])

    def parts(self, batch: TokenBatch) -> list[RankPart]:
        """Return the part of each data-parallel rank: views of one copy, since memory that is new costs more than the
        copying."""
        taken = batch.select(self.sequences)
        for filler in self.fillers.tolist():
            for name, column in {"loss_mask": taken.loss_mask, **taken.token_columns}.items():
                if name != ROUTED_EXPERTS:
                    column[taken.offsets[filler] : taken.offsets[filler + 1]] = 0
        size = self.num_microbatches
        return [RankPart.of(taken, self.bounds[rank * size : (rank + 1) * size + 1]) for rank in range(self.num_ranks)]

    def join(self, batch: TokenBatch, parts: Sequence[Float32Array]) -> Float32Array:
        """float32 [T] in the batch's order, from the values of each data-parallel rank's tokens; 0.0 where there are none."""
        return put_rows(parts, batch.offsets, self.sequences)


def request_for(request: GenerateRequest, prompts: Int64Array) -> GenerateRequest:
    """The request for some of its prompts; seeds and limits go with their samples."""
    return _part(request, prompts, samples_of(request, prompts), request.num_samples)


def request_of_samples(request: GenerateRequest, samples: Int64Array) -> GenerateRequest:
    """The request for some of its samples, int64 [M], each with a prompt of its own."""
    return _part(request, samples // request.num_samples, samples, 1)


def _part(request: GenerateRequest, prompts: Int64Array, samples: Int64Array, num_samples: int) -> GenerateRequest:
    rows = request.prompts
    return evolve(
        request,
        prompts=RaggedTokens(tokens=take_rows(rows.tokens, rows.offsets, prompts), offsets=offsets_of(rows.lengths[prompts])),
        num_samples=num_samples,
        seeds=request.seeds[samples],
        max_tokens=request.max_tokens[samples],
        conversations=None if request.conversations is None else request.conversations[samples],
        images=None if request.images is None else tuple(request.images[prompt] for prompt in prompts.tolist()),
    )


def samples_of(request: GenerateRequest, prompts: Int64Array) -> Int64Array:
    """int64 [S']: the numbers of the samples of some of a request's prompts, in the order of `request_for`."""
    return (prompts[:, None] * request.num_samples + np.arange(request.num_samples)).reshape(-1)


def join_responses(dealt: Sequence[Int64Array], num_samples: int, responses: Sequence[Responses]) -> Responses:
    """The samples in the order of the request that `dealt` divides; a prompt's are copied as one piece."""
    found = {
        prompt: (response, slice(number * num_samples, (number + 1) * num_samples))
        for prompts, response in zip(dealt, responses, strict=True)
        for number, prompt in enumerate(prompts.tolist())
    }
    groups = [found[prompt] for prompt in sorted(found)]
    ends = [(response.result, group.start, group.stop) for response, group in groups]
    pieces = [(result, slice(result.offsets[start], result.offsets[stop])) for result, start, stop in ends]
    joined = GenerateResult(
        tokens=np.concatenate([result.tokens[tokens] for result, tokens in pieces]),
        offsets=offsets_of(np.concatenate([np.diff(result.offsets[start : stop + 1]) for result, start, stop in ends])),
        logprobs=np.concatenate([result.logprobs[tokens] for result, tokens in pieces]),
        weight_versions=np.concatenate([result.weight_versions[tokens] for result, tokens in pieces]),
        finish_reasons=np.concatenate([result.finish_reasons[start:stop] for result, start, stop in ends]),
        routed_experts=_join_routed(ends),
        sampling_mask=_join_masks(pieces),
    )
    return Responses(result=joined, texts=[text for response, group in groups for text in response.texts[group]])


def _join_masks(pieces: Sequence[tuple[GenerateResult, slice]]) -> SamplingMask | None:
    """Join the masks of these tokens of each result; None where no result reports one."""
    found = [part for result, tokens in pieces if (part := _part_of(result.sampling_mask, tokens)) is not None]
    return SamplingMask.join(found) if found else None


def _join_routed(pieces: Sequence[tuple[GenerateResult, int, int]]) -> RoutedExperts | None:
    """Join the experts of the samples from one number to another in each result; None where no result reports them."""
    parts = [(result.routed_experts, slice(start, stop + 1)) for result, start, stop in pieces]
    found = [(routed.experts, routed.offsets[samples]) for routed, samples in parts if routed is not None]
    if not found:
        return None
    return RoutedExperts(
        experts=np.concatenate([experts[offsets[0] : offsets[-1]] for experts, offsets in found]),
        offsets=offsets_of(np.concatenate([np.diff(offsets) for _, offsets in found])),
    )
