"""Sequences to train on, checked and packed."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.spi import GlobalCounts, Problem, TokenBatch
from rlcore.spi.arrays import AnyArray, offsets_of
from rlcore_session.errors import CallError, require_none
from rlcore_session.records import Datum


@frozen(kw_only=True)
class Limits:
    """The limits of a model's sequences."""

    max_sequence_length: int
    """Most tokens of a sequence: rollout.max_prompt_tokens + rollout.max_response_tokens."""
    vocab_size: int | None
    """Tokens that the model has; None where it does not say."""

    def problems(self, path: str, tokens: AnyArray) -> Iterator[Problem]:
        """Yield what is wrong with the tokens of a sequence, integers [T]."""
        if len(tokens) > self.max_sequence_length:
            expected = f"at most {self.max_sequence_length} (rollout.max_prompt_tokens + rollout.max_response_tokens)"
            yield Problem(path=path, found=f"{len(tokens)} tokens", expected=expected, remedy="Raise one of the two.")
        yield from self.unknown_tokens(path, tokens)

    def unknown_tokens(self, path: str, tokens: AnyArray) -> Iterator[Problem]:
        """Yield a problem where a token is none of the model's."""
        last = None if self.vocab_size is None else self.vocab_size - 1
        wrong = tokens[(tokens < 0) | (tokens > (np.iinfo(np.int32).max if last is None else last))]
        if len(wrong):
            expected = "ids that are not negative" if last is None else f"ids from 0 to {last}, the model's vocabulary"
            yield Problem(path=path, found=f"the token {wrong[0]}", expected=expected)


def token_array(tokens: Any) -> AnyArray | None:
    """int64 [T]: token ids; None where they are none."""
    found = _array(tokens)
    return found.astype(np.int64) if found.ndim == 1 and (found.dtype.kind in "iu" or not found.size) else None


def _array(values: Any) -> AnyArray:
    """The values as an array; one of an object where they have no shape, as lists of different lengths."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # numpy's, and torch's of tensors on a GPU or with a gradient
        return np.asarray(type(values).__name__, object)


def tokens_batch(sequences: Sequence[Any], limits: Limits) -> TokenBatch:
    """Pack sequences of token ids, whose tokens but the first count. CallError with all that is wrong."""
    if isinstance(sequences, str) or not isinstance(sequences, Sequence) or not len(sequences):
        raise CallError([_no_sequences("sequences", sequences, "a list of lists of token ids")])
    return _packed([Datum(tokens) for tokens in sequences], limits, "sequences[{}]")


def data_batch(data: Sequence[Datum] | TokenBatch, limits: Limits) -> TokenBatch:
    """Pack the data of a call. CallError with all that is wrong."""
    if isinstance(data, TokenBatch):
        lengths = data.sequences()
        require_none(one for number, tokens in enumerate(lengths) for one in limits.problems(f"data[{number}].tokens", tokens))
        batch = data
    elif isinstance(data, Sequence) and data and all(isinstance(one, Datum) for one in data):
        batch = _packed(data, limits, "data[{}]")
    else:
        raise CallError([_no_sequences("data", data, "a list of Datum, or a TokenBatch")])
    if not batch.loss_mask.any():
        found, expected = "no token that takes part in the loss", "loss_mask True at one token or more"
        raise CallError([Problem(path="data", found=found, expected=expected)])
    return batch


def require_counts(counts: Any) -> None:
    """CallError unless the counts are a GlobalCounts of numbers of at least 1, or None."""
    if counts is None:
        return
    numbers = [counts.num_loss_tokens, counts.num_loss_sequences] if isinstance(counts, GlobalCounts) else [None]
    if not all(isinstance(one, Integral) and one >= 1 for one in numbers):
        raise CallError([Problem(path="counts", found=repr(counts), expected="a GlobalCounts of integers of at least 1")])


def _no_sequences(path: str, found: Any, expected: str) -> Problem:
    kinds = sorted({type(one).__name__ for one in found}) if isinstance(found, list | tuple) else []
    what = f"a list of {', '.join(kinds) or 'nothing'}" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
    return Problem(path=path, found=what, expected=expected)


def _packed(data: Sequence[Datum], limits: Limits, name: str) -> TokenBatch:
    names, of_sequences = _names(data)
    tokens, masks, columns = list[AnyArray](), list[AnyArray](), {column: list[AnyArray]() for column in names}
    problems = list[Problem]()
    for number, datum in enumerate(data):
        path = name.format(number)
        found = token_array(datum.tokens)
        if found is None or not len(found):
            what = "no tokens" if found is not None else f"{datum.tokens!r:.40}"
            problems.append(Problem(path=f"{path}.tokens", found=what, expected="a list of token ids, one at least"))
            continue
        problems += limits.problems(f"{path}.tokens", found)
        tokens.append(found.astype(np.int32))
        mask, wrong = _mask(path, datum.loss_mask, len(found))
        masks.append(mask)
        problems += wrong
        for column in names:
            values, wrong = _column(f"{path}.columns[{column!r}]", datum.columns.get(column), len(found))
            columns[column].append(values)
            problems += wrong
    problems += _sequence_problems(data, of_sequences, name)
    for column, parts in columns.items():
        if len(widths := {part.shape[1:] for part in parts}) > 1 and not problems:
            shapes = ", ".join(str([*width]) for width in sorted(widths))
            problems.append(
                Problem(path=f"data.columns[{column!r}]", found=f"shapes {shapes} of a token", expected="one shape in all data")
            )
    require_none(problems)
    return TokenBatch(
        tokens=np.concatenate(tokens),
        offsets=offsets_of([len(one) for one in tokens]),
        loss_mask=np.concatenate(masks),
        token_columns={column: _narrow(np.concatenate(parts)) for column, parts in columns.items()},
        sequence_columns={
            column: _narrow(np.asarray([datum.sequence_columns[column] for datum in data])) for column in of_sequences
        },
    )


def _names(data: Sequence[Datum]) -> tuple[list[str], list[str]]:
    """Return the names of all columns of tokens, and of sequences."""
    return (
        list(dict.fromkeys(name for datum in data for name in datum.columns)),
        list(dict.fromkeys(name for datum in data for name in datum.sequence_columns)),
    )


def _mask(path: str, given: Any, length: int) -> tuple[AnyArray, list[Problem]]:
    """bool [T], and what is wrong with it."""
    default = np.arange(length) > 0
    if given is None:
        return default, []
    mask, path = _array(given), f"{path}.loss_mask"
    if mask.shape != (length,) or mask.dtype.kind not in "bui" or not np.isin(mask, (0, 1)).all():
        found = f"shape {list(mask.shape)} of {mask.dtype}"
        return default, [Problem(path=path, found=found, expected=f"[{length}] of bool, one a token")]
    if mask[0]:
        expected = "False there: nothing comes before it that could predict it"
        return default, [Problem(path=path, found="True at the first token", expected=expected)]
    return mask.astype(np.bool_), []


def _column(path: str, given: Any, length: int) -> tuple[AnyArray, list[Problem]]:
    """The numbers [T, ...] of a column, and what is wrong with them."""
    if given is None:
        found, expected = "no such column", "one, since others of the data have it"
        return np.zeros(length), [Problem(path=path, found=found, expected=expected)]
    values = _array(given)
    if values.shape[:1] != (length,) or values.dtype.kind not in "biuf":
        found = f"shape {list(values.shape)} of {values.dtype}"
        return np.zeros(length), [Problem(path=path, found=found, expected=f"[{length}] of numbers, one a token")]
    if (wrong := ~_fits(values)).any():
        found = f"{values[wrong][0]} at token {int(np.argwhere(wrong)[0][0])}"
        return np.zeros(length), [Problem(path=path, found=found, expected=_expected(values))]
    return values, []


def _fits(values: AnyArray) -> AnyArray:
    """bool [...]: where a number is one of the dtype that batches hold it in."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = _narrow(values)
    return np.isfinite(narrow) if values.dtype.kind == "f" else narrow == values


def _expected(values: AnyArray) -> str:
    return "finite numbers of float32" if values.dtype.kind == "f" else "integers of int32"


def _sequence_problems(data: Sequence[Datum], names: Sequence[str], name: str) -> Iterator[Problem]:
    for number, datum in enumerate(data):
        for column in names:
            value = datum.sequence_columns.get(column)
            found_value = _array(value)
            if found_value.ndim or found_value.dtype.kind not in "biuf" or not _fits(found_value):
                path = f"{name.format(number)}.sequence_columns[{column!r}]"
                found = "no such column" if value is None else repr(value)
                yield Problem(
                    path=path, found=found, expected="a number of float32 or int32, since others of the data have one"
                )


def _narrow(values: AnyArray) -> AnyArray:
    """float32, int32, int16 or bool, as batches hold them."""
    if values.dtype in (np.int16, np.bool_):
        return values
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int32)


def split(values: AnyArray, batch: TokenBatch) -> list[Any]:
    """Return the part of each sequence of values [T, ...]: copies."""
    return [part.copy() for part in np.split(values, batch.offsets[1:-1])]
