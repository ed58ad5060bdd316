"""Cutting a step's data into what each rank gets, and putting together what comes back."""

from collections.abc import Sequence

import numpy as np
from attrs import field, frozen

from rlcore.run.packing import WIDTH, plan_ranks
from rlcore.spi import GenerateRequest, GenerateResult, RaggedTokens, TokenBatch
from rlcore.spi.arrays import Float32Array, Int64Array, gather_ragged, take_rows


@frozen(kw_only=True, eq=False)
class RankPart:
    """The microbatches of one data-parallel rank, one after another in few large arrays, which travel without being copied."""

    batch: TokenBatch
    bounds: Int64Array
    """int64 [M+1]: microbatch m is the sequences bounds[m] to bounds[m+1]."""

    def microbatches(self) -> tuple[TokenBatch, ...]:
        """Views."""
        return tuple(
            _view(self.batch, start, end)
            for start, end in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)
        )


@frozen(kw_only=True, eq=False)
class Dispatch:
    """Who gets which sequences of a batch."""

    plan: list[list[Int64Array]]
    """Of each data-parallel rank, the sequences of each microbatch; some may be empty."""
    offsets: Int64Array
    """int64 [N+1]: the batch's."""
    filler: int = field(init=False)
    """The sequence that stands in an empty microbatch, where it counts in no loss."""

    @filler.default
    def _shortest(self) -> int:
        return int(np.diff(self.offsets).argmin())

    @classmethod
    def of(cls, batch: TokenBatch, num_ranks: int, max_tokens: int, width: int = WIDTH) -> "Dispatch":
        """Balanced by attention work, for a model of hidden size `width`."""
        plan = plan_ranks(batch.lengths, num_ranks=num_ranks, max_tokens=max_tokens, width=width)
        return cls(plan=plan, offsets=batch.offsets)

    def part(self, batch: TokenBatch, rank: int) -> RankPart:
        """What data-parallel rank `rank` gets."""
        taken = batch.select(self._sequences(rank))
        bounds = np.zeros(len(self.plan[rank]) + 1, np.int64)
        np.cumsum([max(1, len(members)) for members in self.plan[rank]], out=bounds[1:])
        for number, members in enumerate(self.plan[rank]):
            if len(members) == 0:
                tokens = slice(taken.offsets[bounds[number]], taken.offsets[bounds[number + 1]])
                for column in (taken.loss_mask, *taken.token_columns.values()):
                    column[tokens] = 0
        return RankPart(batch=taken, bounds=bounds)

    def join(self, parts: Sequence[Float32Array]) -> Float32Array:
        """float32 [T] in the batch's order, from the values of each data-parallel rank's tokens."""
        sequences = np.concatenate([self._sequences(rank) for rank in range(len(parts))])
        bounds = np.zeros(len(sequences) + 1, np.int64)
        np.cumsum(np.diff(self.offsets)[sequences], out=bounds[1:])
        place = np.empty(len(self.offsets) - 1, np.int64)
        place[sequences] = np.arange(len(sequences))
        return take_rows(np.concatenate(parts), bounds, place)

    def _sequences(self, rank: int) -> Int64Array:
        filler = np.asarray([self.filler], np.int64)
        return np.concatenate([members if len(members) else filler for members in self.plan[rank]])


def deal_prompts(request: GenerateRequest, num_workers: int) -> list[Int64Array]:
    """The prompts of each generator: whole groups, as many for each but for one, long and short ones alike."""
    order = np.argsort(-request.prompts.lengths, kind="stable")
    num_rounds = -(-len(order) // num_workers)
    lanes = np.tile(np.concatenate([np.arange(num_workers), np.arange(num_workers)[::-1]]), (num_rounds + 1) // 2)[: len(order)]
    return [np.sort(order[lanes == worker]) for worker in range(num_workers)]


def part_of(request: GenerateRequest, prompts: Int64Array) -> GenerateRequest:
    """The request for some of its prompts; seeds and limits go with their samples."""
    gather, offsets = gather_ragged(request.prompts.offsets, prompts)
    samples = _samples(prompts, request.num_samples)
    return GenerateRequest(
        prompts=RaggedTokens(tokens=request.prompts.tokens[gather], offsets=offsets),
        num_samples=request.num_samples,
        seeds=request.seeds[samples],
        max_tokens=request.max_tokens[samples],
        sampling=request.sampling,
        weight_version=request.weight_version,
    )


def join_results(dealt: Sequence[Int64Array], num_samples: int, results: Sequence[GenerateResult]) -> GenerateResult:
    """The samples in the order of the request that `dealt` divides; a prompt's are copied as one piece."""
    found = {
        prompt: (result, slice(number * num_samples, (number + 1) * num_samples))
        for prompts, result in zip(dealt, results, strict=True)
        for number, prompt in enumerate(prompts.tolist())
    }
    groups = [found[prompt] for prompt in sorted(found)]
    pieces = [(result, slice(result.offsets[group.start], result.offsets[group.stop])) for result, group in groups]
    lengths = np.concatenate([np.diff(result.offsets)[group] for result, group in groups])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return GenerateResult(
        tokens=np.concatenate([result.tokens[tokens] for result, tokens in pieces]),
        offsets=offsets,
        logprobs=np.concatenate([result.logprobs[tokens] for result, tokens in pieces]),
        weight_versions=np.concatenate([result.weight_versions[tokens] for result, tokens in pieces]),
        finish_reasons=np.concatenate([result.finish_reasons[group] for result, group in groups]),
    )


def _samples(prompts: Int64Array, num_samples: int) -> Int64Array:
    return (prompts[:, None] * num_samples + np.arange(num_samples)).reshape(-1)


def _view(batch: TokenBatch, start: int, end: int) -> TokenBatch:
    tokens = slice(int(batch.offsets[start]), int(batch.offsets[end]))
    return TokenBatch(
        tokens=batch.tokens[tokens],
        offsets=batch.offsets[start : end + 1] - batch.offsets[start],
        loss_mask=batch.loss_mask[tokens],
        token_columns={name: column[tokens] for name, column in batch.token_columns.items()},
        sequence_columns={name: column[start:end] for name, column in batch.sequence_columns.items()},
    )
