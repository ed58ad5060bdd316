"""Continuous batching: requests join while others run, and each sample is handed out as it ends.

Samples wait in the queues of their requests; as many as the cache has places are decoded at the same time, one token each a
step. When a sample ends, the next in the queue follows.

Shapes: S samples of a request, B places in use, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlcore.spi import FinishReason, GenerateRequest, NonFiniteError, SamplingParams
from rlcore.spi.arrays import BoolArray, Int64Array
from rlcore_transformers.attention import PromptAttention, SlotAttention
from rlcore_transformers.batch_slots import BatchSlots, Kind
from rlcore_transformers.cache import SlotCache
from rlcore_transformers.decoder import Decoder
from rlcore_transformers.jobs import Deliver, Job, Prefilled, Routing, hand_out
from rlcore_transformers.sampling import position_keys, sample_tokens, token_logprobs, top_logprobs
from rlcore_transformers.schemas import SchemaMatcher
from rlcore_transformers.stopping import StopStrings

Kinds: TypeAlias = Sequence[tuple[Kind, Int64Array | slice]]
"""Kinds of sampling, with the rows of each."""
SCORED_TOKENS = 512
"""Prompt tokens whose logits are in memory at once."""


class Generation:
    """The requests under way, all with the same weights."""

    def __init__(
        self,
        decoder: Decoder,
        cache: SlotCache | None,
        *,
        device: torch.device,
        max_batch_size: int,
        max_prefill_tokens: int,
        max_length: int,
        weight_version: int,
        new_stop_strings: Callable[[tuple[str, ...]], StopStrings],
        new_matcher: Callable[[SamplingParams], SchemaMatcher],
    ) -> None:
        """`cache` is replaced where it is too small; no sequence is longer than `max_length`."""
        self._decoder = decoder
        self.cache = cache
        self._device = device
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._max_length = max_length
        self._weight_version = weight_version
        self._new_stop_strings = new_stop_strings
        self._new_matcher = new_matcher
        self._queue: deque[Job] = deque()
        """Requests of which a sample has no place yet."""
        self._num_left = 0
        """Samples that have not ended."""
        self._slots = BatchSlots() if cache is None else BatchSlots(cache.num_slots, cache.length)
        self._last = torch.zeros(0, dtype=torch.int64, device=self._device)
        """int64 [B]: the token that each place drew last."""
        self._kinds: dict[SamplingParams, Kind] = {}
        """Kinds of sampling of the requests under way, and of some that have ended."""

    def add(self, request: GenerateRequest, limits: Int64Array, deliver: Deliver) -> None:
        """Let a request join, which has at least one sample; `limits` int64 [S]: most tokens of each. `deliver` gets its
        samples as they end."""
        if self.is_idle:
            self._kinds.clear()
        if request.sampling not in self._kinds:
            self._kinds[request.sampling] = Kind.of(request.sampling, self._decoder.vocab_size)
        routing = Routing(request, limits, self._decoder.routing_shape) if request.routed_experts else None
        job = Job(request, limits, deliver, routing)
        self._queue.append(job)
        self._num_left += len(limits)
        self._make_room(min(self._max_batch_size, self._num_left), max(waiting.longest for waiting in self._queue))

    @property
    def is_idle(self) -> bool:
        """True where every sample has ended."""
        return not self._num_left

    def step(self) -> None:
        """Give free places to the next samples; with none, or nobody who waits, draw one more token in every place."""
        self._hand_out_ended({place: FinishReason.ABORTED for place, reader in self._slots.readers if reader.cancelled.done()})
        if self.is_idle:
            return
        if self._queue and self._slots.num_free:
            self._admit(self._queue[0])
            if not self._queue[0].has_waiting:
                self._queue.popleft()
        else:
            self._decode()

    def cut(self) -> None:
        """Hand out what has not ended, with the tokens that it has."""
        finished = [
            self._slots.finished(place, FinishReason.ABORTED, self._weight_version) for place in range(len(self._slots))
        ]
        finished += [(job, sample) for job in self._queue for sample in job.unbegun()]
        self._queue.clear()
        self._num_left = 0
        self._keep(np.zeros(0, np.int64))
        hand_out(finished)

    def _make_room(self, num_places: int, length: int) -> None:
        """See to it that the cache has so many places of this length; what it holds moves into a larger one."""
        held = self.cache
        if held is not None and num_places <= held.num_slots and length <= held.length:
            return
        num_in_use = len(self._slots)
        if held is None or not num_in_use:
            held = self.cache = None  # freed before the next is made
            self.cache = SlotCache(num_places, length)
            self._slots = BatchSlots(self.cache.num_slots, self.cache.length)
            return
        # At least doubled, so that requests that come one by one do not move what it holds again and again.
        self.cache = SlotCache(
            _grown(held.num_slots, num_places, self._max_batch_size), _grown(held.length, length, self._max_length)
        )
        self.cache.take(held, num_in_use, int(self._slots.positions.max()))
        self._slots.grow(self.cache.num_slots, self.cache.length)

    def _admit(self, job: Job) -> None:
        """Give free places to the next samples of a request and draw their first tokens."""
        assert self.cache is not None
        prefilled = job.prefilled or self._prefill(job)
        first = len(self._slots)
        taken, rest = prefilled.take(self._slots.num_free)
        job.prefilled = rest if len(rest.samples) else None
        rows = torch.from_numpy(taken.rows).to(self._device)
        self.cache.fill(first, taken.attention, rows)
        sampling = job.request.sampling
        kind, strings = self._kinds[sampling], sampling.stop_strings
        texts = [self._new_stop_strings(strings) if strings else None for _ in taken.samples]
        matchers = [None if sampling.json_schema is None else self._new_matcher(sampling) for _ in taken.samples]
        self._slots.add(job, taken.samples, kind, texts, matchers)
        self._draw(taken.logits[rows], first, [(kind, slice(None))])

    def _prefill(self, job: Job) -> Prefilled:
        """Run the next prompts through the model, longest first, once for all samples of each."""
        longest = int(job.prompt_lengths[job.waiting[0]])
        count = max(1, self._max_prefill_tokens // longest)
        if self._decoder.needs_equal_lengths:
            count = min(count, int((job.prompt_lengths[job.waiting] == longest).sum()))
        prompts, job.waiting = job.waiting[:count], job.waiting[count:]
        tokens = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : job.prompt_lengths[prompt]] = job.request.prompts.sequence(prompt)
        attention = PromptAttention(*tokens.shape)
        positions = torch.arange(longest, device=self._device).repeat(len(prompts))
        routed = self._unrouted(tokens.size) if job.routing is not None else None
        hidden = self._decoder.forward(torch.from_numpy(tokens).to(self._device).flatten(), positions, attention, routed)
        if job.routing is not None and routed is not None:
            job.routing.add_prompts(prompts, routed.unflatten(0, tokens.shape).cpu().numpy())
        self._tell_of_prompts(job, prompts, hidden.unflatten(0, tokens.shape))
        lasts = np.arange(len(prompts)) * longest + job.prompt_lengths[prompts] - 1
        num_samples = job.request.num_samples
        return Prefilled(
            attention=attention,
            logits=self._decoder.logits(hidden[torch.from_numpy(lasts).to(self._device)]),
            rows=np.repeat(np.arange(len(prompts)), num_samples),
            samples=(prompts[:, None] * num_samples + np.arange(num_samples)).flatten(),
        )

    def _tell_of_prompts(self, job: Job, prompts: Int64Array, hidden: Tensor) -> None:
        """Give the log-probabilities of these prompts, hidden [prompts, length, H], to the readers that want them."""
        num_samples = job.request.num_samples
        for row, prompt in enumerate(prompts.tolist()):
            tokens = torch.from_numpy(job.request.prompts.sequence(prompt)[1:].astype(np.int64)).to(self._device)
            for sample in range(prompt * num_samples, (prompt + 1) * num_samples):
                reader = job.reader_of(sample)
                if reader is not None and reader.on_prompt is not None:
                    parts = zip(hidden[row, : len(tokens)].split(SCORED_TOKENS), tokens.split(SCORED_TOKENS), strict=True)
                    rows = [token_logprobs(self._decoder.logits(one), found, reader.num_logprobs or 0) for one, found in parts]
                    reader.on_prompt([entry for part in rows for entry in part])

    def _decode(self) -> None:
        """One more token in every place."""
        assert self.cache is not None
        written = self._slots.positions - 1
        positions = torch.from_numpy(written).to(self._device)
        attention = SlotAttention(self.cache, positions, int(written.max()) + 1)
        routings = self._slots.routings
        routed = self._unrouted(len(written)) if routings else None
        hidden = self._decoder.forward(self._last, positions, attention, routed)
        if routed is not None:
            experts = routed.cpu().numpy()
            for routing, places, samples in routings:
                routing.add_tokens(samples, written[places], experts[places])
        self._last = self._last[:0]
        self._draw(self._decoder.logits(hidden), 0, self._slots.kinds)

    def _unrouted(self, num_rows: int) -> Tensor:
        """Room for the experts of so many tokens."""
        return torch.full((num_rows, *self._decoder.routing_shape), -1, dtype=torch.int16, device=self._device)

    def _draw(self, logits: Tensor, first: int, kinds: Kinds) -> None:
        """Draw a token from each row of logits, for the places from `first` on, and hand out the samples that end."""
        places = slice(first, first + len(logits))
        logits = self._constrained(logits, first)
        keys = torch.from_numpy(position_keys(self._slots.seeds[places], self._slots.positions[places])).to(self._device)
        drawn, drawn_logprobs, kept = _sample(logits, keys, kinds)
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            broken = self._slots[first + int(np.isfinite(logprobs).argmin())].sample
            raise NonFiniteError(f"sample {broken}: found a log-probability that is NaN or infinite; are the weights finite?")
        self._note_kept(kept, first, kinds)
        for number, matcher in self._slots.matchers:
            if number >= first:
                matcher.take(int(tokens[number - first]))
        self._last = torch.cat((self._last, drawn))
        full = self._slots.write(first, tokens, logprobs)
        self._tell_readers(logits, drawn, first)
        stopped = self._stopped(tokens, first, kinds)
        ended = np.flatnonzero(stopped | full)
        reasons = np.where(stopped, FinishReason.STOP, FinishReason.LENGTH)[ended].tolist()
        self._hand_out_ended({first + row: FinishReason(reason) for row, reason in zip(ended.tolist(), reasons, strict=True)})

    def _constrained(self, logits: Tensor, first: int) -> Tensor:
        """Return logits [rows, V] for the places from `first` on, -inf at tokens that schemas forbid."""
        matchers = [(number - first, matcher) for number, matcher in self._slots.matchers if number >= first]
        if not matchers:
            return logits
        allowed = np.ones(logits.shape, np.bool_)
        for row, matcher in matchers:
            allowed[row] = matcher.allowed()
        return logits.masked_fill(torch.from_numpy(~allowed).to(self._device), -torch.inf)

    def _hand_out_ended(self, reasons: Mapping[int, FinishReason]) -> None:
        """Hand out the samples in these places, and free the places."""
        if reasons:
            finished = [self._slots.finished(place, reason, self._weight_version) for place, reason in reasons.items()]
            self._num_left -= len(reasons)
            self._keep(np.setdiff1d(np.arange(len(self._slots)), list(reasons), assume_unique=True))
            hand_out(finished)

    def _tell_readers(self, logits: Tensor, drawn: Tensor, first: int) -> None:
        """Give each token drawn, int64 [rows], to the reader of its sample, for the places from `first` on."""
        for number, reader in self._slots.readers:
            if number < first or reader.on_tokens is None:
                continue
            row, place = number - first, self._slots[number]
            found = () if reader.num_logprobs is None else (top_logprobs(logits[row], drawn[row], place.kind.sampling, reader),)
            before = int(self._slots.positions[number] - self._slots.prompt_lengths[number]) - 1
            reader.on_tokens(before, [int(drawn[row])], found)

    def _note_kept(self, kept: Sequence[Tensor | None], first: int, kinds: Kinds) -> None:
        """Note what the tokens of each kind were chosen among, bool [rows, V], for the requests that want to know."""
        for (_, rows), is_kept in zip(kinds, kept, strict=True):
            if is_kept is None:
                continue
            places = [self._slots[first + row] for row in np.arange(len(self._slots) - first)[rows].tolist()]
            wanted = [row for row, place in enumerate(places) if place.job.kept is not None]
            found, tokens = is_kept[wanted].nonzero(as_tuple=True)
            bounds = np.searchsorted(found.cpu().numpy(), np.arange(1, len(wanted)))
            for row, part in zip(wanted, np.split(tokens.int().cpu().numpy(), bounds), strict=False):
                places[row].job.note_kept(places[row].sample, part)

    def _stopped(self, tokens: Int64Array, first: int, kinds: Kinds) -> BoolArray:
        """bool [B]: which samples these tokens end, of the places from `first` on."""
        stopped = np.zeros(len(tokens), np.bool_)
        for kind, rows in kinds:
            stopped[rows] = kind.stops[tokens[rows]]
            if kind.sampling.stop_strings:
                for row in np.arange(len(tokens))[rows].tolist():
                    text = self._slots[first + row].text
                    stopped[row] |= text is not None and text.complete(int(tokens[row]))
        return stopped

    def _keep(self, kept: Int64Array) -> None:
        """Keep the samples at these places alone, ascending, and close the gaps with the last of them."""
        sources, gaps = (torch.from_numpy(places).to(self._device) for places in self._slots.keep(kept))
        if len(gaps):
            assert self.cache is not None
            self._last[gaps] = self._last[sources]
            self.cache.move(sources, gaps, int(self._slots.positions[gaps.cpu().numpy()].max()))
        self._last = self._last[: len(kept)]


def _sample(logits: Tensor, keys: Tensor, kinds: Kinds) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """Tokens int64 and log-probabilities float32 [B], of each row by its kind of sampling; and for each kind what its tokens
    were chosen among, bool [rows, V] or None."""
    if len(kinds) == 1:
        tokens, logprobs, kept = sample_tokens(logits, keys, kinds[0][0].sampling)
        return tokens, logprobs, [kept]
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = torch.zeros(len(logits), device=logits.device)
    masks = []
    for kind, rows in kinds:
        tokens[rows], logprobs[rows], kept = sample_tokens(logits[rows], keys[rows], kind.sampling)
        masks.append(kept)
    return tokens, logprobs, masks


def _grown(held: int, needed: int, most: int) -> int:
    return held if needed <= held else max(needed, min(2 * held, most))
