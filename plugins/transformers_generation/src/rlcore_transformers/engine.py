"""Continuous batching: one generate request from prompts to finished samples.

Samples wait in a queue; as many as the cache has places are decoded at the same time, one token each a step. Places in use
are the first ones, always: when a sample ends, the last one moves into its place, and the next in the queue follows at the end.

Shapes: S samples, B places in use, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, NonFiniteError
from rlcore.spi.arrays import BoolArray, Float32Array, Int64Array, offsets_of
from rlcore_transformers.cache import PromptAttention, SlotAttention, SlotCache
from rlcore_transformers.forward import Decoder
from rlcore_transformers.routing import Routing
from rlcore_transformers.sampling import position_keys, sample_tokens
from rlcore_transformers.stopping import StopStrings


@frozen(eq=False)
class Prefilled:
    """Prompts that went through the model, and the samples of theirs that have no place yet."""

    attention: PromptAttention
    logits: Tensor
    """[prompts, V] after each prompt's last token."""
    rows: Int64Array
    """int64 [samples]: the prompt, by its row here."""
    samples: Int64Array
    """int64 [samples]: the sample's number in the request."""

    def take(self, count: int) -> tuple["Prefilled", "Prefilled"]:
        """The first `count` samples, and the rest."""
        first = Prefilled(self.attention, self.logits, self.rows[:count], self.samples[:count])
        return first, Prefilled(self.attention, self.logits, self.rows[count:], self.samples[count:])


class Generation:
    """The state of one request while it runs."""

    def __init__(
        self,
        request: GenerateRequest,
        limits: Int64Array,
        decoder: Decoder,
        cache: SlotCache,
        max_prefill_tokens: int,
        new_stop_strings: Callable[[], StopStrings] | None,
    ) -> None:
        """`limits` int64 [S]: most tokens of each sample; the cache holds every prompt with its limit."""
        self._request = request
        self._limits = limits
        self._decoder = decoder
        self._cache = cache
        self._device = cache.keys[0].device
        self._max_prefill_tokens = max_prefill_tokens
        self._stops = np.zeros(decoder.dims.vocab_size, np.bool_)
        self._stops[[token for token in request.sampling.stop_token_ids if 0 <= token < decoder.dims.vocab_size]] = True
        self._texts = None if new_stop_strings is None else [new_stop_strings() for _ in limits]
        self._prompt_lengths = request.prompts.lengths
        self._waiting = np.argsort(-self._prompt_lengths, kind="stable")
        self._prefilled: Prefilled | None = None
        self._samples = np.zeros(cache.num_slots, np.int64)
        """int64 [slots]: number of the sample in each place."""
        self._positions = np.zeros(cache.num_slots, np.int64)
        """int64 [slots]: position of the token that each place draws next."""
        self._tokens = torch.zeros(0, dtype=torch.int64, device=self._device)
        """int64 [B]: the token that each place drew last."""
        self._drawn: list[tuple[Int64Array, Int64Array, Int64Array, Float32Array]] = []
        """Sample, index in the response, token, log-probability, each [B], by step."""
        self._routing = Routing(request, limits, decoder.routing_shape) if request.routed_experts else None
        self._finish_reasons = np.full(len(limits), FinishReason.ABORTED, np.uint8)

    def run(self) -> GenerateResult:
        """Decode until no sample is left."""
        while self._waiting.size or self._prefilled or len(self._tokens):
            if len(self._tokens) < self._cache.num_slots and (self._waiting.size or self._prefilled):
                self._admit()
            else:
                self._decode()
        return self._result()

    def _admit(self) -> None:
        """Give free places to the next samples and draw their first tokens."""
        prefilled = self._prefilled or self._prefill()
        first = len(self._tokens)
        taken, rest = prefilled.take(self._cache.num_slots - first)
        self._prefilled = rest if len(rest.samples) else None
        rows = torch.from_numpy(taken.rows).to(self._device)
        self._cache.fill(first, taken.attention, rows)
        places = slice(first, first + len(rows))
        self._samples[places] = taken.samples
        self._positions[places] = self._prompt_lengths[taken.samples // self._request.num_samples]
        self._draw(taken.logits[rows], first)

    def _prefill(self) -> Prefilled:
        """Run the next prompts through the model, longest first, once for all samples of each."""
        longest = int(self._prompt_lengths[self._waiting[0]])
        count = max(1, self._max_prefill_tokens // longest)
        prompts, self._waiting = self._waiting[:count], self._waiting[count:]
        tokens = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : self._prompt_lengths[prompt]] = self._request.prompts.sequence(prompt)
        attention = PromptAttention(*tokens.shape)
        positions = torch.arange(longest, device=self._device).repeat(len(prompts))
        routed = self._unrouted(tokens.size)
        hidden = self._decoder.forward(torch.from_numpy(tokens).to(self._device).flatten(), positions, attention, routed)
        if self._routing is not None and routed is not None:
            self._routing.add_prompts(prompts, routed.unflatten(0, tokens.shape).cpu().numpy())
        lasts = np.arange(len(prompts)) * longest + self._prompt_lengths[prompts] - 1
        num_samples = self._request.num_samples
        return Prefilled(
            attention=attention,
            logits=self._decoder.logits(hidden[torch.from_numpy(lasts).to(self._device)]),
            rows=np.repeat(np.arange(len(prompts)), num_samples),
            samples=(prompts[:, None] * num_samples + np.arange(num_samples)).flatten(),
        )

    def _decode(self) -> None:
        """One more token in every place."""
        written = self._positions[: len(self._tokens)] - 1
        positions = torch.from_numpy(written).to(self._device)
        attention = SlotAttention(self._cache, positions, int(written.max()) + 1)
        routed = self._unrouted(len(written))
        hidden = self._decoder.forward(self._tokens, positions, attention, routed)
        if self._routing is not None and routed is not None:
            self._routing.add_tokens(self._samples[: len(written)], written, routed.cpu().numpy())
        self._tokens = self._tokens[:0]
        self._draw(self._decoder.logits(hidden), 0)

    def _unrouted(self, num_rows: int) -> Tensor | None:
        """Room for the experts of so many tokens, where they are wanted."""
        if self._routing is None:
            return None
        return torch.full((num_rows, *self._decoder.routing_shape), -1, dtype=torch.int16, device=self._device)

    def _draw(self, logits: Tensor, first: int) -> None:
        """Draw a token from each row of logits, for the places from `first` on, and free the places of samples that end."""
        places = slice(first, first + len(logits))
        samples, positions = self._samples[places].copy(), self._positions[places]
        keys = torch.from_numpy(position_keys(self._request.seeds[samples], positions)).to(self._device)
        drawn, drawn_logprobs = sample_tokens(logits, keys, self._request.sampling)
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            broken = int(samples[np.isfinite(logprobs).argmin()])
            raise NonFiniteError(f"sample {broken}: found a log-probability that is NaN or infinite; are the weights finite?")
        indices = positions - self._prompt_lengths[samples // self._request.num_samples]
        self._drawn.append((samples, indices, tokens, logprobs))
        self._tokens = torch.cat((self._tokens, drawn))
        positions += 1
        ended = self._ended(samples, indices, tokens)
        if ended.any():
            self._free(first + np.flatnonzero(ended))

    def _ended(self, samples: Int64Array, indices: Int64Array, tokens: Int64Array) -> BoolArray:
        """bool [B]: which samples this token ends; their finish reasons are set."""
        stopped = self._stops[tokens]
        if self._texts is not None:
            stopped |= [self._texts[sample].complete(token) for sample, token in zip(samples, tokens.tolist(), strict=True)]
        ended = stopped | (indices + 1 >= self._limits[samples])
        self._finish_reasons[samples[ended]] = np.where(stopped[ended], FinishReason.STOP, FinishReason.LENGTH)
        return ended

    def _free(self, ended: Int64Array) -> None:
        """Close the gaps at the places `ended` with the last places' samples."""
        num_left = len(self._tokens) - len(ended)
        kept = np.setdiff1d(np.arange(num_left, len(self._tokens)), ended, assume_unique=True)
        gaps = ended[ended < num_left]
        self._samples[gaps], self._positions[gaps] = self._samples[kept], self._positions[kept]
        if len(gaps):
            sources, targets = torch.from_numpy(kept).to(self._device), torch.from_numpy(gaps).to(self._device)
            self._tokens[targets] = self._tokens[sources]
            self._cache.move(sources, targets, int(self._positions[gaps].max()))
        self._tokens = self._tokens[:num_left]

    def _result(self) -> GenerateResult:
        samples, indices, tokens, logprobs = (np.concatenate(column) for column in zip(*self._drawn, strict=True))
        offsets = offsets_of(np.bincount(samples, minlength=len(self._limits)))
        order = offsets[samples] + indices
        result_tokens, result_logprobs = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.float32)
        result_tokens[order], result_logprobs[order] = tokens, logprobs
        return GenerateResult(
            tokens=result_tokens,
            offsets=offsets,
            logprobs=result_logprobs,
            weight_versions=np.full(len(tokens), self._request.weight_version, np.int32),
            finish_reasons=self._finish_reasons,
            routed_experts=None if self._routing is None else self._routing.result(np.diff(offsets)),
        )
