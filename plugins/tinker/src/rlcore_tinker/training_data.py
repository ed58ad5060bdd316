"""Data of a forward_backward request: read from protobuf, checked, and packed for the trainer.

Position i of `model_input` predicts `target_tokens[i]`. The trainer's sequence is the input and, behind it, the last target: it
computes the log-probability of target i as that of its own token i + 1. So a target that takes part in the loss has to be the
next token of the input. One that takes no part may be any, and its log-probability is 0.0 where it differs.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.spi import RaggedTokens, TokenBatch
from rlcore.spi.arrays import AnyArray, BoolArray, Float32Array, Int32Array
from rlcore_tinker.errors import RequestError, refuse
from rlcore_tinker.loss_table import (
    CLIP_INPUTS,
    COLUMNS,
    RATIO_INPUT,
    TARGETS_INPUT,
    TOKEN_WEIGHTS,
    WEIGHTS_INPUT,
    Loss,
    find_loss,
    read_constants,
)
from rlcore_tinker.wire import CLASSES, CONTENT_TYPE

_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int64), 3: np.dtype(np.int32)}
"""numpy's dtype of the protocol's DType."""


@frozen(kw_only=True)
class Limits:
    """Limits of the sequences of the served model."""

    max_sequence_length: int
    """Most tokens of a sequence."""
    vocab_size: int | None
    """Tokens that the model has; None where nobody knows."""


@frozen(kw_only=True, eq=False)
class TrainingPiece:
    """The data of one forward_backward request."""

    model_id: str
    seq_id: int
    loss: Loss
    config: Mapping[str, float]
    """The loss's constants, in full."""
    forward_only: bool
    batch: TokenBatch
    """The sequences, with the columns that the loss reads."""
    served: tuple[BoolArray, ...]
    """bool [N] for each datum: whether target i is token i + 1 of its sequence."""

    def outputs(self, logprobs: Sequence[Float32Array]) -> list[Float32Array]:
        """Return the log-probabilities of each datum's targets, float32 [N], from those of its sequence, [N+1]."""
        return [np.where(served, found[1:], np.float32(0)) for served, found in zip(self.served, logprobs, strict=True)]


@frozen(kw_only=True, eq=False)
class RawPiece:
    """A forward_backward request as it came, of which model and place are known."""

    message: Any

    @property
    def model_id(self) -> str:
        """The model that the request is for."""
        return str(self.message.model_id)

    @property
    def seq_id(self) -> int:
        """The request's place among those of its model."""
        return int(self.message.seq_id)

    @classmethod
    def parse(cls, content: bytes, content_type: str) -> "RawPiece":
        """Parse a body. RequestError where it is no such message."""
        if content_type != CONTENT_TYPE:
            raise RequestError(f"forward_backward: found a body of {content_type!r:.60}; expected {CONTENT_TYPE}", status=415)
        try:
            return cls(message=CLASSES["ForwardBackwardRequest"].FromString(content))
        except Exception as error:
            raise RequestError(f"forward_backward: the body is no ForwardBackwardRequest: {error}") from error

    def read(self, limits: Limits) -> TrainingPiece:
        """Check everything. RequestError with all problems."""
        message = self.message
        loss = find_loss(message.loss_fn)
        raw = {key: float(value) for key, value in message.loss_fn_config.items()}
        raw |= {key: getattr(value, value.WhichOneof("kind") or "text") for key, value in message.loss_fn_config_v2.items()}
        config = read_constants(loss, raw)
        if not message.data:
            raise RequestError("data: found no datum; expected at least one")
        problems: list[str] = []
        data = [_datum(f"data[{number}]", datum, loss, config, limits, problems) for number, datum in enumerate(message.data)]
        refuse(problems)
        return TrainingPiece(
            model_id=self.model_id,
            seq_id=self.seq_id,
            loss=loss,
            config={key: value for key, value in config.items() if key not in CLIP_INPUTS},
            forward_only=message.forward_only,
            batch=_pack([one for one in data if one is not None], loss),
            served=tuple(one.served for one in data if one is not None),
        )


@frozen(kw_only=True, eq=False)
class _Datum:
    tokens: Int32Array
    """int32 [N+1]"""
    active: BoolArray
    """bool [N]: whether the target takes part in the loss."""
    served: BoolArray
    columns: Mapping[str, Float32Array]
    """float32 [N] each."""


def _datum(
    path: str, message: Any, loss: Loss, config: Mapping[str, float], limits: Limits, problems: list[str]
) -> _Datum | None:
    """Read one datum, or None where it has problems, which are added."""
    known, found = len(problems), {name: _array(f"{path}.{name}", tensor, problems) for name, tensor in _inputs(message)}
    tokens = _tokens(path, message, problems)
    expected = (TARGETS_INPUT, *loss.required)
    problems += [f"{path}: found no {name}; expected one with {loss.name}" for name in expected if name not in found]
    for name in found:
        if name not in (TARGETS_INPUT, *loss.inputs):
            takes = ", ".join((TARGETS_INPUT, *loss.inputs))
            problems.append(f"{path}: found {name!r:.60}, which {loss.name} does not read; expected {takes}")
    for name, array in found.items():
        if array is not None and tokens is not None and array.shape != tokens.shape:
            problems.append(f"{path}.{name}: found shape {list(array.shape)}; expected [{len(tokens)}], as model_input")
        elif array is not None and name == TARGETS_INPUT and array.dtype.kind != "i":
            problems.append(f"{path}.{name}: found {array.dtype}; expected int64")
        elif array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
            first = int(np.argmin(np.isfinite(array)))
            problems.append(f"{path}.{name}: found {array[first]} at position {first}; expected finite numbers")
    if len(problems) > known or tokens is None:
        return None
    arrays = {name: array for name, array in found.items() if array is not None}
    targets = arrays.pop(TARGETS_INPUT)
    sequence = np.append(tokens, targets[-1:]).astype(np.int64)
    if len(sequence) > limits.max_sequence_length:
        longest = limits.max_sequence_length
        problems.append(f"{path}: found {len(sequence)} tokens, the last target included; expected at most {longest}")
    top = float("inf") if limits.vocab_size is None else limits.vocab_size
    wrong = (sequence < 0) | (sequence >= top)
    if wrong.any():
        problems.append(f"{path}: found the token {sequence[wrong.argmax()]}; expected ids from 0 to below {top}")
    served = targets == sequence[1:]
    active = _active(arrays, loss, len(targets))
    if (active & ~served).any():
        first = int((active & ~served).argmax())
        target, following = targets[first], sequence[first + 1]
        problems.append(
            f"{path}.{TARGETS_INPUT}: found {target} at position {first}, where model_input goes on with {following}; "
            "expected the next token wherever the loss counts it"
        )
    if len(problems) > known:
        return None
    defaults = {WEIGHTS_INPUT: 1.0, **{name: config[name] for name in CLIP_INPUTS if name in config}}
    columns = {
        COLUMNS.get(name, name): arrays[name].astype(np.float32)
        if name in arrays
        else np.full(len(targets), defaults[name], np.float32)
        for name in loss.inputs
    }
    return _Datum(tokens=sequence.astype(np.int32), active=active, served=served, columns=columns)


def _active(arrays: Mapping[str, AnyArray], loss: Loss, length: int) -> BoolArray:
    """bool [N]: the targets that take part: those of a sequence's ratio, and those whose weight is not 0 and of which some
    other required input is not 0. An advantage and a sampler's log-probability of 0.0 mark a token that nobody sampled."""
    active = np.full(length, not loss.required)
    for name in loss.required:
        active |= arrays[name] != 0
    if WEIGHTS_INPUT in arrays:
        active &= arrays[WEIGHTS_INPUT] != 0
    return active | (arrays[RATIO_INPUT] != 0) if RATIO_INPUT in arrays else active


def _inputs(message: Any) -> list[tuple[str, Any]]:
    return sorted(message.loss_fn_inputs.items())


def _tokens(path: str, message: Any, problems: list[str]) -> Int32Array | None:
    kinds = {chunk.WhichOneof("kind") for chunk in message.model_input} - {"encoded_text"}
    if kinds:
        problems.append(f"{path}.model_input: found a chunk of {', '.join(map(str, kinds))}; expected tokens alone")
        return None
    chunks = [chunk.encoded_text.tokens for chunk in message.model_input]
    if not any(chunks) or any(len(chunk) % 4 for chunk in chunks):
        problems.append(f"{path}.model_input: found {sum(map(len, chunks))} bytes; expected int32 tokens, at least one")
        return None
    return np.frombuffer(b"".join(chunks), np.int32)


def _array(path: str, tensor: Any, problems: list[str]) -> AnyArray | None:
    """The array of a tensor, or None where it is none that the server reads."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.WhichOneof("kind") == "sparse_csr":
        what = "a sparse tensor" if dtype is not None else f"dtype {tensor.dtype}"
        problems.append(f"{path}: found {what}; expected a dense one of float32 or int64, [N]")
        return None
    shape = tuple(tensor.shape)
    is_whole = len(tensor.dense) % dtype.itemsize == 0 and min(shape, default=0) >= 0
    if not is_whole or (shape and prod(shape) * dtype.itemsize != len(tensor.dense)):
        problems.append(f"{path}: found {len(tensor.dense)} bytes of {dtype} for shape {list(shape)}; expected as many as that")
        return None
    array: AnyArray = np.frombuffer(tensor.dense, dtype)
    return array.reshape(shape) if shape else array


def _pack(data: Sequence[_Datum], loss: Loss) -> TokenBatch:
    """The batch of the data. Where no token takes part in the loss, one does with weight 0.0: a trainer needs one."""
    packed = RaggedTokens.from_lists([one.tokens.tolist() for one in data])
    first = [np.zeros(1, np.float32)]
    mask = np.concatenate([part for one in data for part in (np.zeros(1, np.bool_), one.active)])
    columns = {name: np.concatenate([part for one in data for part in (*first, one.columns[name])]) for name in loss.columns}
    if not mask.any():
        mask[1], columns[TOKEN_WEIGHTS][1] = True, 0.0
    return TokenBatch(tokens=packed.tokens, offsets=packed.offsets, loss_mask=mask, token_columns=columns)
