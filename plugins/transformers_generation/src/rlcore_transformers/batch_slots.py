"""Slots of the batch that is decoded. Slots in use are the first ones: the last sample moves into the slot of one that ends.


Shapes: B places in use, V vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
from attrs import frozen

from rlcore.spi import FinishReason, SamplingParams, TokenReader
from rlcore.spi.arrays import BoolArray, Float32Array, Int64Array
from rlcore_torchkit.generation import FinishedSample
from rlcore_transformers.jobs import Job, Routing
from rlcore_transformers.schemas import SchemaMatcher
from rlcore_transformers.stopping import StopStrings

Thing = TypeVar("Thing")


@frozen(eq=False)
class Kind:
    """A kind of sampling, with the tokens that end its samples."""

    sampling: SamplingParams
    stops: BoolArray
    """bool [V]"""

    @classmethod
    def of(cls, sampling: SamplingParams, vocab_size: int) -> "Kind":
        """This sampling."""
        stops = np.zeros(vocab_size, np.bool_)
        stops[[token for token in sampling.stop_token_ids if 0 <= token < vocab_size]] = True
        return cls(sampling, stops)


@frozen(eq=False)
class Place:
    """The sample in a place."""

    job: Job
    sample: int
    """Its number in the request."""
    kind: Kind
    text: StopStrings | None
    """Looks for its stop strings; None where there are none."""
    matcher: SchemaMatcher | None
    """Says which tokens its schema allows; None without one."""

    @property
    def reader(self) -> TokenReader | None:
        """The reader of the sample's tokens, if it has one."""
        return self.job.reader_of(self.sample)


class BatchSlots:
    """B samples, and what has been drawn of them."""

    _BY_PLACE = ("seeds", "prompt_lengths", "limits", "positions")

    def __init__(self, num_places: int = 0, length: int = 0) -> None:
        """Room for so many samples of at most so many tokens; none is there yet."""
        self._taken: list[Place] = []
        self.seeds = np.zeros(0, np.int64)
        """int64 [B], as those that follow."""
        self.prompt_lengths = np.zeros(0, np.int64)
        self.limits = np.zeros(0, np.int64)
        """Most tokens of each sample."""
        self.positions = np.zeros(0, np.int64)
        """Position of the token that is drawn next."""
        self._tokens = np.zeros((num_places, length), np.int32)
        """int32 [places, tokens]: what was drawn; `_logprobs` float32 alike."""
        self._logprobs = np.zeros((num_places, length), np.float32)

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, place: int) -> Place:
        return self._taken[place]

    @property
    def num_free(self) -> int:
        """Places that are not in use."""
        return len(self._tokens) - len(self)

    @cached_property
    def kinds(self) -> list[tuple[Kind, Int64Array | slice]]:
        """The kinds of sampling there are, with the places of each."""
        return _by_identity([place.kind for place in self._taken])

    @cached_property
    def readers(self) -> list[tuple[int, TokenReader]]:
        """The places whose samples have readers."""
        return [(number, place.reader) for number, place in enumerate(self._taken) if place.reader is not None]

    @cached_property
    def routings(self) -> list[tuple[Routing, Int64Array | slice, Int64Array]]:
        """The requests whose experts are wanted, with their places and the number of the sample in each."""
        parts = _by_identity([place.job.routing for place in self._taken])
        if len(parts) == 1 and parts[0][0] is None:
            return []
        numbers = np.array([place.sample for place in self._taken], np.int64)
        return [(routing, places, numbers[places]) for routing, places in parts if routing is not None]

    def grow(self, num_places: int, length: int) -> None:
        """Make room for so many samples of so many tokens, neither less than now."""
        self._tokens, self._logprobs = (
            np.pad(drawn, [(0, num_places - drawn.shape[0]), (0, length - drawn.shape[1])])
            for drawn in (self._tokens, self._logprobs)
        )

    @cached_property
    def matchers(self) -> list[tuple[int, SchemaMatcher]]:
        """The places whose samples have schemas."""
        return [(number, place.matcher) for number, place in enumerate(self._taken) if place.matcher is not None]

    def add(
        self,
        job: Job,
        samples: Int64Array,
        kind: Kind,
        texts: list[StopStrings | None],
        matchers: Sequence[SchemaMatcher | None],
    ) -> None:
        """Put samples of a request in the next places; `texts` look for their stop strings, and `matchers` follow their
        schemas."""
        lengths = job.prompt_lengths[samples // job.request.num_samples]
        added = (job.request.seeds[samples], lengths, job.limits[samples], lengths)
        for name, values in zip(self._BY_PLACE, added, strict=True):
            setattr(self, name, np.concatenate([getattr(self, name), values]))
        new = [
            Place(job, sample, kind, text, matcher)
            for sample, text, matcher in zip(samples.tolist(), texts, matchers, strict=True)
        ]
        self._change(self._taken + new)

    def write(self, first: int, tokens: Int64Array, logprobs: Float32Array) -> BoolArray:
        """Take one more token of each sample from a place on; bool [samples]: which have come to their limit."""
        places = slice(first, first + len(tokens))
        rows, indices = np.arange(first, first + len(tokens)), self.positions[places] - self.prompt_lengths[places]
        self._tokens[rows, indices], self._logprobs[rows, indices] = tokens, logprobs
        self.positions[places] += 1
        full: BoolArray = indices + 1 >= self.limits[places]
        return full

    def finished(self, place: int, reason: FinishReason, weight_version: int) -> tuple[Job, FinishedSample]:
        """The sample in a place as it is now, with its request."""
        job, sample = self[place].job, self[place].sample
        length = int(self.positions[place] - self.prompt_lengths[place])
        return job, FinishedSample(
            number=sample,
            tokens=self._tokens[place, :length].copy(),
            logprobs=self._logprobs[place, :length].copy(),
            weight_versions=np.full(length, weight_version, np.int32),
            finish_reason=reason,
            routed_experts=None if job.routing is None else job.routing.result(sample, length),
            sampling_mask=job.take_mask(sample),
        )

    def keep(self, kept: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Keep the samples in these places alone, ascending; returns where the last of them came from, and went to."""
        order = np.arange(len(kept))
        gaps = np.setdiff1d(order, kept, assume_unique=True)
        sources = order[gaps] = kept[kept >= len(kept)]
        self._tokens[gaps], self._logprobs[gaps] = self._tokens[sources], self._logprobs[sources]
        for name in self._BY_PLACE:
            setattr(self, name, getattr(self, name)[order])
        self._change([self._taken[place] for place in order.tolist()])
        return sources, gaps

    def _change(self, taken: list[Place]) -> None:
        self._taken = taken
        self.__dict__.pop("kinds", None)
        self.__dict__.pop("routings", None)
        self.__dict__.pop("readers", None)
        self.__dict__.pop("matchers", None)


def _by_identity(values: Sequence[Thing]) -> list[tuple[Thing, Int64Array | slice]]:
    """Each distinct object, with the positions where it is; all of them are a slice."""
    if len(set(map(id, values))) == 1:
        return [(values[0], slice(None))]
    positions: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        positions.setdefault(id(value), []).append(position)
    return [(values[found[0]], np.array(found)) for found in positions.values()]
