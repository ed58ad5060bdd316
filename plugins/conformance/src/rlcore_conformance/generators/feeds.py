"""A feed that the kit scripts: requests by and by, and all that was delivered."""

import threading
from collections.abc import Callable, Sequence

from attrs import define, field

from rlcore.spi import GenerateRequest, GenerateResult
from rlcore.spi.arrays import Float32Array, Int32Array, Int64Array


@define(kw_only=True, eq=False)
class Delivered:
    """One sample as it was handed out."""

    tokens: Int32Array
    logprobs: Float32Array
    weight_versions: Int32Array
    finish_reason: int


@define(kw_only=True, eq=False)
class ScriptedFeed:
    """Gives the first requests at once, and what `then` returns after each delivery; None from it ends the stream, as does that
    all samples were delivered."""

    first: Sequence[GenerateRequest]
    then: Callable[[], Sequence[GenerateRequest] | None] = tuple
    delivered: dict[int, Delivered] = field(factory=dict)
    """By the sample's number, in the order of delivery."""
    num_samples: int = 0
    """Samples of all requests taken."""
    _waiting: list[GenerateRequest] = field(init=False)
    _has_ended: bool = False
    _changed: threading.Condition = field(factory=threading.Condition)

    def __attrs_post_init__(self) -> None:
        self._waiting = list(self.first)

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """The next requests; see rlcore.spi.SampleFeed."""
        with self._changed:
            while True:
                if self._has_ended or (not self._waiting and len(self.delivered) == self.num_samples):
                    return None
                if self._waiting or not wait:
                    taken, self._waiting = self._waiting, []
                    self.num_samples += sum(len(request.seeds) for request in taken)
                    return taken
                self._changed.wait()

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        """Keep the samples, and ask `then` what comes next."""
        with self._changed:
            for row, number in enumerate(samples.tolist()):
                part = slice(result.offsets[row], result.offsets[row + 1])
                self.delivered[number] = Delivered(
                    tokens=result.tokens[part],
                    logprobs=result.logprobs[part],
                    weight_versions=result.weight_versions[part],
                    finish_reason=int(result.finish_reasons[row]),
                )
            requests = None if self._has_ended else self.then()
            if requests is None:
                self._has_ended = True
            else:
                self._waiting += requests
            self._changed.notify_all()

    def end(self) -> None:
        """End the stream."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
