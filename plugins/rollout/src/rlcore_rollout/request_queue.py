"""Queue between single sample requests and a generator's stream, which takes and returns them in batches; and its figures."""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import monotonic
from typing import TypeAlias

import numpy as np
from attrs import define

from rlcore.spi import GenerateRequest, RaggedTokens, SamplingParams
from rlcore.spi.arrays import Int64Array, offsets_of
from rlcore.spi.execution import Responses
from rlcore_rollout.environment_calls import POLL_S
from rlcore_rollout.episode import Completion, CompletionRequest, completions_of

OnCompletions: TypeAlias = Callable[[Sequence[Completion]], None]


@define(eq=False)
class _Request:
    """A request under way: its samples by their number in the stream, from `first` on."""

    first: int
    wanted: list[CompletionRequest | None]
    num_left: int


class RequestQueue:
    """A stream's feed that any thread may ask for samples.

    What is asked for waits until the generator takes it, and is then one request a kind of sampling. A stream that fails owes
    what it has taken: `requeue` asks for that again.
    """

    def __init__(self, on_completions: OnCompletions) -> None:
        """`on_completions` gets samples that ended, from the generator's threads; it is quick and never raises."""
        self._on_completions = on_completions
        self._changed = threading.Condition()
        self.first_take = threading.Event()
        """Set once the stream's generator has taken from the queue."""
        self._waiting: list[CompletionRequest] = []
        self._taken: list[_Request] = []
        """Ascending by number."""
        self._num_samples = 0
        self._has_ended = True
        self._weight_version = 0
        self._watch: Callable[[], bool] | None = None
        self._watched_at = 0.0
        self._error: BaseException | None = None

    @property
    def num_outstanding(self) -> int:
        """Samples that wait or are under way."""
        with self._changed:
            return len(self._waiting) + sum(request.num_left for request in self._taken)

    @property
    def has_ended(self) -> bool:
        """Return whether the stream is to end, or none has begun."""
        return self._has_ended

    def begin(self, weight_version: int, watch: Callable[[], bool] | None = None) -> None:
        """Begin another stream; what waits is asked for at this version or a newer one, what goes on before what begins. The
        generator's thread calls `watch` every POLL_S: False, or an error, ends the stream."""
        self._watch, self._error = watch, None
        with self._changed:
            assert not self._taken, "a stream that has ended owes nothing"
            self.first_take.clear()
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

    def requeue(self) -> int:
        """Ask again for what a stream that failed has taken and not delivered; how many samples that are."""
        with self._changed:
            owed = [wanted for request in self._taken for wanted in request.wanted if wanted is not None]
            self._waiting, self._taken = owed + self._waiting, []
        return len(owed)

    def failure(self) -> BaseException | None:
        """The error of `watch` that ended the stream; returned once."""
        error, self._error = self._error, None
        return error

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """See rlcore.spi.execution.ResponseFeed."""
        self.first_take.set()
        while True:
            self._look()
            with self._changed:
                if self._has_ended:
                    return None
                if self._waiting or not wait:
                    waiting, self._waiting = self._waiting, []
                    return [self._request(samples) for samples in _alike(waiting)]
                self._changed.wait(None if self._watch is None else POLL_S)

    def _look(self) -> None:
        """Call `watch` when it is due. Never raises: this runs within the generator."""
        if self._watch is None or monotonic() - self._watched_at < POLL_S:
            return
        try:
            if not self._watch():
                self.end()
        except BaseException as error:
            self._error = error
            self.end()
        self._watched_at = monotonic()

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """See rlcore.spi.execution.ResponseFeed."""
        owed = self._owed(samples)
        handed = completions_of([wanted for _, _, wanted in owed], responses)
        self._settle(owed)  # only now, or an error before would lose them
        self._on_completions(handed)

    def _request(self, samples: Sequence[Sequence[CompletionRequest]]) -> GenerateRequest:
        """One request of the samples of each of P prompts, as many of each."""
        flat = [wanted for shared in samples for wanted in shared]
        prompts = [shared[0].prompt for shared in samples]
        self._taken.append(_Request(self._num_samples, list(flat), len(flat)))
        self._num_samples += len(flat)
        images = tuple(shared[0].images for shared in samples)
        readers = tuple(wanted.reader for wanted in flat)
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
            readers=readers if any(readers) else None,
        )

    def _owed(self, samples: Int64Array) -> list[tuple[_Request, int, CompletionRequest]]:
        """Return the requests under these numbers: the requests, the places in them, and the samples."""
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
    """Return the settings that all samples of a request share."""
    return wanted.sampling, wanted.routed_experts, wanted.sampling_mask


class SampleCount:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_sampled = 0
        self._num_asked = 0
        """Samples asked for that have not come."""
        self._is_generating: bool | None = None
        """True where a stream runs; None before the first."""
        self._since = time.perf_counter()
        self._idle_s = self._busy_s = self._stopped_s = 0.0

    def begin(self) -> None:
        """Count samples, idle and busy seconds anew."""
        with self._lock:
            self._pass()
            self._num_sampled, self._idle_s, self._busy_s = 0, 0.0, 0.0

    def ask(self, number: int) -> None:
        """So many more are asked for."""
        with self._lock:
            self._pass()
            self._num_asked += number

    def withdraw(self, number: int) -> None:
        """So many are asked for no longer."""
        self.ask(-number)

    def add_arrived(self, number: int, num_ended: int) -> tuple[int, int]:
        """So many have come, of which some have ended. Returns how many have ended since `begin`, and how many that makes with
        those which are asked for."""
        with self._lock:
            self._pass()
            self._num_asked -= number
            self._num_sampled += num_ended
            return self._num_sampled, self._num_sampled + self._num_asked

    def generating(self, is_generating: bool) -> None:
        """A stream begins, or has ended; it may be said several times over."""
        with self._lock:
            self._pass()
            self._is_generating = is_generating

    def stopped_s(self) -> float:
        """Seconds in which no stream ran, since the first did."""
        with self._lock:
            self._pass()
            return self._stopped_s

    def idle_s(self) -> float:
        """Seconds since `begin` in which no sample was asked for: what was waited for was the environment."""
        with self._lock:
            self._pass()
            return self._idle_s

    def busy_s(self) -> float:
        """Seconds since `begin` in which samples were generated: a stream ran, and some sample of it had not come."""
        with self._lock:
            self._pass()
            return self._busy_s

    def _pass(self) -> None:
        """Count the seconds since the last change."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        if not self._num_asked:
            self._idle_s += passed
        elif self._is_generating:
            self._busy_s += passed
        if self._is_generating is False:
            self._stopped_s += passed
