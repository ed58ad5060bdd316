"""Queue between single sample requests and a generator's stream, which takes and returns them in batches."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from attrs import define

from rlcore.spi import FinishReason, GenerateRequest, RaggedTokens, SamplingMask, SamplingParams
from rlcore.spi.arrays import Float32Array, Int16Array, Int32Array, Int64Array, offsets_of
from rlcore.spi.execution import Responses

_REASONS = {int(reason): reason for reason in FinishReason}


# Not frozen, as nothing is of which one is made for each turn: that more than doubles the time that it takes.
@define(kw_only=True, eq=False)
class CompletionRequest:
    """One sample that is asked for."""

    prompt: Int32Array
    """int32 [length]: all that it has read and said. Samples of one array, asked for one after another, share a prompt."""
    seed: int
    max_tokens: int
    sampling: SamplingParams
    owner: object
    """Whose sample it is."""
    routed_experts: bool = False
    sampling_mask: bool = False
    goes_on: bool = False
    """Whether its episode has said something before."""
    conversation: int = -1
    """GenerateRequest.conversations of it."""
    images: tuple[bytes, ...] = ()
    """What the prompt shows; the same of all samples that share one."""


@define(kw_only=True, eq=False)
class Completion:
    """What came of it."""

    wanted: CompletionRequest
    text: str
    tokens: Int32Array
    """int32 [T]"""
    logprobs: Float32Array
    """float32 [T]"""
    weight_versions: Int32Array
    """int32 [T]"""
    finish_reason: FinishReason
    routed_experts: Int16Array | None = None
    """int16 [prompt and T, L, K]"""
    sampling_mask: SamplingMask | None = None
    """What each of the T tokens was chosen among."""


HandOut: TypeAlias = Callable[[Sequence[Completion]], None]


@define(eq=False)
class _Request:
    """A request under way: its samples by their number in the stream, from `first` on."""

    first: int
    wanted: list[CompletionRequest | None]
    num_left: int


class RequestFeed:
    """A stream's feed that any thread may ask for samples.

    What is asked for waits until the generator takes it, and is then one request a kind of sampling. A stream that fails owes
    what it has taken: `requeue` asks for that again.
    """

    def __init__(self, hand_out: HandOut) -> None:
        """`hand_out` gets samples that ended, from the generator's threads; it is quick and never raises."""
        self._hand_out = hand_out
        self._changed = threading.Condition()
        self.looked_at = threading.Event()
        """Set once the stream's generator has looked at the feed."""
        self._waiting: list[CompletionRequest] = []
        self._taken: list[_Request] = []
        """Ascending by number."""
        self._num_samples = 0
        self._has_ended = True
        self._weight_version = 0

    @property
    def num_outstanding(self) -> int:
        """Samples that wait or are under way."""
        with self._changed:
            return len(self._waiting) + sum(request.num_left for request in self._taken)

    @property
    def has_ended(self) -> bool:
        """Whether the stream is to end, or none has begun."""
        return self._has_ended

    def begin(self, weight_version: int) -> None:
        """Begin another stream; what waits is asked for at this version or a newer one, what goes on before what begins."""
        with self._changed:
            assert not self._taken, "a stream that has ended owes nothing"
            self.looked_at.clear()
            self._num_samples, self._has_ended, self._weight_version = 0, False, weight_version
            # Behind those that have not begun, a generator with few places would leave them to age.
            self._waiting.sort(key=lambda wanted: not wanted.goes_on)

    def ask(self, wanted: Sequence[CompletionRequest]) -> None:
        """Ask for samples; those that share a prompt are adjacent."""
        with self._changed:
            self._waiting += wanted
            self._changed.notify_all()

    def withdraw(self, is_wanted: Callable[[CompletionRequest], bool]) -> int:
        """Ask no longer for what waits and is not wanted; how much that was. What is under way goes on."""
        with self._changed:
            num_before = len(self._waiting)
            self._waiting = [wanted for wanted in self._waiting if is_wanted(wanted)]
            return num_before - len(self._waiting)

    def end(self) -> None:
        """End the stream: what has not ended comes back with the tokens that it has; what waits goes on waiting."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until something is asked for or the stream is to end, at most so long."""
        with self._changed:
            if not self._waiting and not self._has_ended:
                self._changed.wait(timeout_s)

    def requeue(self) -> None:
        """Ask again for what a stream that failed has taken and not delivered."""
        with self._changed:
            owed = [wanted for request in self._taken for wanted in request.wanted if wanted is not None]
            self._waiting, self._taken = owed + self._waiting, []

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """See rlcore.spi.execution.ResponseFeed."""
        self.looked_at.set()
        with self._changed:
            while wait and not self._waiting and not self._has_ended:
                self._changed.wait()
            if self._has_ended:
                return None
            waiting, self._waiting = self._waiting, []
            return [self._request(samples) for samples in _alike(waiting)]

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """See rlcore.spi.execution.ResponseFeed."""
        result = responses.result
        tokens = result.tokens.view()
        tokens.flags.writeable = False  # environments see them, and they are what will be trained on
        bounds, reasons = result.offsets.tolist(), result.finish_reasons.tolist()
        routed, mask = result.routed_experts, result.sampling_mask
        rows = None if routed is None else routed.offsets.tolist()
        handed, owed = [], self._owed(samples)
        for row, (_, _, wanted) in enumerate(owed):
            part = slice(bounds[row], bounds[row + 1])
            experts = None if routed is None or rows is None else routed.experts[rows[row] : rows[row + 1]]
            handed.append(
                Completion(
                    wanted=wanted,
                    text=responses.texts[row],
                    tokens=tokens[part],
                    logprobs=result.logprobs[part],
                    weight_versions=result.weight_versions[part],
                    finish_reason=_REASONS[reasons[row]],
                    routed_experts=experts,
                    sampling_mask=None if mask is None else mask.slice(part.start, part.stop),
                )
            )
        self._settle(owed)  # only now, or an error before would lose them
        self._hand_out(handed)

    def _request(self, samples: Sequence[Sequence[CompletionRequest]]) -> GenerateRequest:
        """One request of the samples of each of P prompts, as many of each."""
        flat = [wanted for shared in samples for wanted in shared]
        prompts = [shared[0].prompt for shared in samples]
        self._taken.append(_Request(self._num_samples, list(flat), len(flat)))
        self._num_samples += len(flat)
        images = tuple(shared[0].images for shared in samples)
        conversations = np.array([wanted.conversation for wanted in flat], np.int64)
        return GenerateRequest(
            prompts=RaggedTokens(tokens=np.concatenate(prompts), offsets=offsets_of([len(prompt) for prompt in prompts])),
            num_samples=len(samples[0]),
            seeds=np.array([wanted.seed for wanted in flat], np.int64),
            max_tokens=np.array([wanted.max_tokens for wanted in flat], np.int32),
            sampling=flat[0].sampling,
            weight_version=self._weight_version,
            routed_experts=flat[0].routed_experts,
            sampling_mask=flat[0].sampling_mask,
            conversations=conversations if (conversations >= 0).any() else None,
            images=images if any(images) else None,
        )

    def _owed(self, samples: Int64Array) -> list[tuple[_Request, int, CompletionRequest]]:
        """What was asked for under these numbers: the requests, the places in them, and the samples."""
        found, request = [], None
        with self._changed:
            for number in samples.tolist():
                if request is None or not 0 <= number - request.first < len(request.wanted):
                    request = self._taken[self._index(number)]
                wanted = request.wanted[number - request.first]
                assert wanted is not None, "the handle delivers each sample once"
                found.append((request, number - request.first, wanted))
        return found

    def _settle(self, owed: Sequence[tuple[_Request, int, CompletionRequest]]) -> None:
        """Owe these samples no longer."""
        with self._changed:
            for request, place, _ in owed:
                request.wanted[place] = None
                request.num_left -= 1
                if not request.num_left:
                    del self._taken[self._index(request.first)]

    def _index(self, number: int) -> int:
        return bisect_right(self._taken, number, key=attrgetter("first")) - 1


def _alike(waiting: Sequence[CompletionRequest]) -> list[list[list[CompletionRequest]]]:
    """Samples of one prompt together, and prompts of as many samples and the same sampling in one request."""
    shared: list[list[CompletionRequest]] = []
    for wanted in waiting:
        if shared and wanted.prompt is shared[-1][0].prompt and _kind(wanted) == _kind(shared[-1][0]):
            shared[-1].append(wanted)
        else:
            shared.append([wanted])
    requests: dict[tuple[int, SamplingParams, bool, bool], list[list[CompletionRequest]]] = {}
    for samples in shared:
        requests.setdefault((len(samples), *_kind(samples[0])), []).append(samples)
    return list(requests.values())


def _kind(wanted: CompletionRequest) -> tuple[SamplingParams, bool, bool]:
    """What all samples of a request have in common."""
    return wanted.sampling, wanted.routed_experts, wanted.sampling_mask
