"""Samples of many calls through one stream of the generator."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from attrs import define, evolve, field

from rlcore.run.execution.refit import Refitter
from rlcore.spi import FinishReason, GenerateRequest
from rlcore.spi.arrays import Int32Array, Int64Array
from rlcore.spi.execution import GeneratorGroup, Responses
from rlcore_session.errors import CallError, not_held
from rlcore_session.records import Completion


@define(eq=False)
class SampleCall:
    """A request for samples, and its answer."""

    request: GenerateRequest
    future: "Future[list[Completion]]" = field(factory=Future)
    adapter: str | None = None
    """The adapter that samples, by its name in the generator; None is that of the last sync."""
    version: int = 0
    """The version of its weights, once a stream has taken it."""
    turn: int = 0
    """The number of other calls that came before it."""
    first: int = 0
    """The number of its first sample in the stream."""
    samples: dict[int, Completion] = field(factory=dict)
    """Samples by their number within the request."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples that it asks for."""
        return len(self.request.seeds)

    def prompt(self, sample: int) -> Int32Array:
        """int32 [P]: the prompt of one of its samples."""
        return self.request.prompts.sequence(sample // self.request.num_samples)


class Sampler:
    """Collects calls for samples. One stream answers all that are waiting, and those that come while it runs."""

    def __init__(self, generator: GeneratorGroup, refitter: Refitter) -> None:
        self._generator, self._refitter = generator, refitter
        self.changed = threading.Condition()
        self._waiting = deque[SampleCall]()
        self._taken: list[SampleCall] = []
        self._turn = 0
        self.version = 0
        """Version of the weights that the last sync brought."""

    def add(self, call: SampleCall) -> None:
        """Add a call behind those that wait."""
        with self.changed:
            call.turn = self._turn
            self._waiting.append(call)
            self.changed.notify_all()

    def end_turn(self) -> None:
        """Let no later call join the stream that runs: another call is to have the generator's thread."""
        with self.changed:
            self._turn += 1
            self.changed.notify_all()

    def answer(self, latest: int, around: Callable[[Callable[[], None]], None]) -> None:
        """Answer the calls of the oldest turn, unless it comes after `latest`. `around` calls the function that it gets, which
        generates; an error of it is that of each call."""
        with self.changed:
            if not self._waiting or self._waiting[0].turn > latest:
                return
            turn = self._waiting[0].turn
        try:
            around(lambda: self._stream(turn))
        except BaseException as error:
            with self.changed:
                failed = [*self._taken, *(call for call in self._waiting if call.turn == turn)]
                self._waiting = deque(call for call in self._waiting if call.turn != turn)
                self._taken = []
            for call in failed:
                if not call.future.done():
                    call.future.set_exception(error)

    def _stream(self, turn: int) -> None:
        """One stream. Calls that an earlier one has begun with and not answered begin anew."""
        with self.changed:
            self._waiting.extendleft(reversed(self._taken))
            self._taken = []
        self._generator.stream(_Stream(self, turn), self.version)

    def take(self, turn: int, first: int) -> list[SampleCall]:
        """The waiting calls of a turn, whose samples are numbered from `first` on. Called with the lock held."""
        taken = list[SampleCall]()
        while self._waiting and self._waiting[0].turn == turn:
            call = self._waiting.popleft()
            if call.future.running() or call.future.set_running_or_notify_cancel():
                if not self._finds_adapter(call):
                    call.future.set_exception(CallError([not_held(str(call.adapter), self._refitter.held)]))
                    continue
                call.first, call.samples = first, {}
                first += call.num_samples
                taken.append(call)
        self._taken += taken
        return taken

    def _finds_adapter(self, call: SampleCall) -> bool:
        """Note the version that a call is answered with, and that its adapter is used. False where it is not held."""
        refitter = self._refitter
        name = refitter.adapter if call.adapter is None else call.adapter
        call.version = self.version if call.adapter is None else refitter.held.get(name, -1)
        if name in refitter.held:
            refitter.use(name)
        call.request = evolve(call.request, weight_version=call.version, adapter=name)
        return call.version >= 0

    def done(self, call: SampleCall) -> None:
        """A call is answered. Called with the lock held."""
        self._taken.remove(call)


class _Stream:
    """The feed of one stream: it ends once every call is answered and none of its turn waits."""

    def __init__(self, sampler: Sampler, turn: int) -> None:
        self._sampler = sampler
        self._turn = turn
        self._calls = list[SampleCall]()
        self._num_taken = self._num_missing = 0
        self._ended = False

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """See ResponseFeed."""
        with self._sampler.changed:
            while not self._ended:
                if calls := self._sampler.take(self._turn, self._num_taken):
                    count = sum(call.num_samples for call in calls)
                    self._calls += calls
                    self._num_taken += count
                    self._num_missing += count
                    return [call.request for call in calls]
                if not self._num_missing:
                    self._ended = True
                elif not wait:
                    return []
                else:
                    self._sampler.changed.wait()
            return None

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """See ResponseFeed."""
        answered = list[SampleCall]()
        with self._sampler.changed:
            for place, number in enumerate(samples.tolist()):
                call = next(one for one in reversed(self._calls) if one.first <= number)
                prompt = call.prompt(number - call.first)
                call.samples[number - call.first] = _completion(responses, place, prompt, call.version)
                if len(call.samples) == call.num_samples:
                    self._sampler.done(call)
                    answered.append(call)
            self._num_missing -= len(samples)
            self._sampler.changed.notify_all()
        for call in answered:
            call.future.set_result([call.samples[number] for number in range(call.num_samples)])

    def end(self) -> None:
        """See ResponseFeed."""
        with self._sampler.changed:
            self._ended = True
            self._sampler.changed.notify_all()


def _completion(responses: Responses, place: int, prompt: Int32Array, version: int) -> Completion:
    """One of the samples of a result: a copy."""
    result = responses.result
    part = slice(int(result.offsets[place]), int(result.offsets[place + 1]))
    versions = result.weight_versions[part]
    return Completion(
        tokens=np.array(result.tokens[part]),
        logprobs=np.array(result.logprobs[part]),
        text=responses.texts[place],
        finish_reason=FinishReason(int(result.finish_reasons[place])),
        weight_version=int(versions[-1]) if len(versions) else version,
        prompt=prompt,
    )
