"""Records the tokens that each token was sampled among, beside vLLM's sampler, whose processed logits are -inf for those cut.

vLLM's own report of this needs a top-k, and is not in all versions that serve. For both of its model runners; each step in
which somebody wants to know waits for the device once.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.spi import SamplingMask, SamplingParams
from rlcore.spi.arrays import Int32Array
from rlcore_vllm.engines.recorder import RecordedRequest, replace_sample


def truncates(sampling: SamplingParams) -> bool:
    """Return whether a sampler leaves tokens out of the distribution that its log-probabilities are of."""
    is_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.json_schema is not None
    return sampling.temperature > 0 and is_cut


class MaskRecorder:
    """Records the kept tokens of expected requests by the position of the sampled token. Of a position that a preempted request
    samples again, the last record counts."""

    def __init__(self, runner: Any) -> None:
        """Watch the sampler of a worker's model runner."""
        self._runner = runner
        self._kept: dict[str, dict[int, Int32Array]] = {}
        self._sample = runner.sampler.sample
        self._signature = inspect.signature(self._sample)
        replace_sample(runner.sampler, self._sample_and_note)

    def expect(self, request: str) -> None:
        """Note what a request's tokens are sampled among, until it is fetched or forgotten."""
        self._kept[request] = {}

    def fetch(self, requests: Sequence[RecordedRequest]) -> list[SamplingMask]:
        """Return the notes on each request, which has ended; nothing of it is kept."""
        return [self._fetch(one) for one in requests]

    def forget(self, requests: Iterable[str]) -> None:
        """Keep nothing of these."""
        for request in requests:
            self._kept.pop(request, None)

    def _fetch(self, one: RecordedRequest) -> SamplingMask:
        kept = self._kept.pop(one.request)
        places = range(one.prompt_length, one.prompt_length + one.num_tokens)
        missing = [place for place in places if place not in kept]
        if missing:
            raise RuntimeError(f"nothing was noted of what request {one.request} sampled its token {missing[0]} among")
        return SamplingMask.of([kept[place] for place in places])

    def _sample_and_note(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled, processed = self._sample(*args, **kwargs)
        if self._kept and processed is not None:
            self._note(processed, self._signature.bind(*args, **kwargs).arguments)
        return sampled, processed

    def _note(self, processed: Tensor, arguments: dict[str, Any]) -> None:
        """`processed` [B, V] are the logits or log-probabilities of each row, -inf where they were cut."""
        places = {row: place for row, place in self._placement(arguments) if place[0] in self._kept}
        if not places:
            return
        rows = torch.tensor(list(places), device=processed.device)
        found, tokens = (processed[rows] > -torch.inf).nonzero(as_tuple=True)
        both = torch.stack([found, tokens]).int().cpu().numpy()
        bounds = np.searchsorted(both[0], np.arange(1, len(places)))
        for (request, position), kept in zip(places.values(), np.split(both[1], bounds), strict=True):
            self._kept[request][position] = kept.copy()  # a view would hold all rows of the step

    def _placement(self, arguments: dict[str, Any]) -> Iterable[tuple[int, tuple[str, int]]]:
        """Each row that belongs to a request, with the request and the position of the token that is sampled."""
        if "expanded_idx_mapping" in arguments:  # model runner V2
            requests = {slot: request for request, slot in self._runner.req_states.req_id_to_index.items()}
            slots, before = (arguments[name].tolist() for name in ("expanded_idx_mapping", "pos"))
            return [
                (row, (requests[slot], position + 1))
                for row, (slot, position) in enumerate(zip(slots, before, strict=True))
                if slot in requests
            ]
        batch = self._runner.input_batch
        positions = batch.num_tokens_no_spec[: len(batch.req_ids)].tolist()
        return list(enumerate(zip(batch.req_ids, positions, strict=True)))
