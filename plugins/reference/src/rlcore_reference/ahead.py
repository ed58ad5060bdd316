"""Asking a reference on devices of its own while others generate, reward and train."""

import threading
from collections.abc import Callable

import numpy as np
from attrs import define

from rlcore.spi import ContractError, Images, TokenBatch
from rlcore.spi.arrays import Float32Array, Int32Array, Int64Array, offsets_of

Compute = Callable[[TokenBatch], Float32Array]
POLL_S = 0.5
_Key = tuple[bytes, tuple[bytes, ...]]
"""The tokens of a sequence, and the images that it reads."""


@define(kw_only=True)
class _Known:
    """The log-probabilities of a sequence, float32 or float64 [length]."""

    values: Float32Array
    asked: int
    """How many batches had been asked for when they came."""


class ReferenceAhead:
    """A thread that asks for sequences as they come, all that wait at once. A batch then waits for what is under way, and for
    the sequences that nobody had told of before. What no batch has asked for in a while is dropped."""

    def __init__(self, compute: Compute, *, keeps: int) -> None:
        """`compute` returns float32 or float64 [T] of a batch, and is called in the thread alone; a sequence is known for
        `keeps` batches after that which was next when it came."""
        self._compute, self._keeps = compute, keeps
        self._waiting: dict[_Key, Int32Array] = {}
        self._under_way: dict[_Key, Int32Array] = {}
        self._known: dict[_Key, _Known] = {}
        self._asked = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="reference", daemon=True)
        self._thread.start()

    def add(self, tokens: Int32Array, images: tuple[bytes, ...] = ()) -> None:
        """A sequence that a batch will ask for, or may, and the images that it reads. From any thread."""
        with self._changed:
            if (key := (tokens.tobytes(), images)) not in self._known and key not in self._under_way:
                self._waiting[key] = tokens
                self._changed.notify_all()

    def logprobs(self, batch: TokenBatch, sequences: Int64Array) -> Float32Array:
        """[T], in the dtype of `compute`: of every token of some of the batch's sequences, int64 [M], and 0.0 in the others.
        Raises what the reference raised."""
        parts = {int(n): batch.tokens[batch.offsets[n] : batch.offsets[n + 1]] for n in sequences}
        images = {number: () if batch.images is None else batch.images[number] for number in parts}
        keys = {number: (tokens.tobytes(), images[number]) for number, tokens in parts.items()}
        for number, tokens in parts.items():
            self.add(tokens, images[number])
        with self._changed:
            while self._error is None and not all(key in self._known for key in keys.values()):
                self._changed.wait(POLL_S)
            if self._error is not None:
                raise self._error
            values = [self._known[key].values for key in keys.values()]
            result = np.zeros(batch.num_tokens, np.result_type(np.float32, *values))
            for number, key in keys.items():
                result[batch.offsets[number] : batch.offsets[number + 1]] = self._known[key].values
            self._asked += 1
            used, oldest = {*keys.values()}, self._asked - self._keeps
            self._known = {key: one for key, one in self._known.items() if key not in used and one.asked >= oldest}
        return result

    def close(self) -> None:
        """End the thread, once the call that is under way has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                taken = self._under_way = self._waiting
                self._waiting = {}
            try:
                found = self._compute(_batch_of([*taken.values()], tuple(images for _, images in taken)))
                ends = np.cumsum([len(tokens) for tokens in taken.values()])
                if found.shape != (ends[-1],):
                    raise ContractError(f"the reference returned shape {found.shape} for {ends[-1]} tokens")
                parts = np.split(found, ends[:-1])
            except BaseException as error:  # raised again where a batch asks
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._under_way = {}
                for key, values in zip(taken, parts, strict=True):
                    self._known[key] = _Known(values=values, asked=self._asked)
                self._changed.notify_all()


def _batch_of(sequences: list[Int32Array], images: Images) -> TokenBatch:
    tokens = np.concatenate(sequences)
    offsets = offsets_of([len(one) for one in sequences])
    shown = images if any(images) else None
    return TokenBatch(tokens=tokens, offsets=offsets, loss_mask=np.zeros(len(tokens), np.bool_), images=shown)
