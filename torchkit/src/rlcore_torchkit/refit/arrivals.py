"""Compares what a refit announces and brings with the tensors that the model has."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import get_args

from rlcore.schema.suggestions import listed
from rlcore.spi.errors import RefitError
from rlcore.spi.weights import DtypeName, TensorSpec

_MAX_NAMED = 5


def check_specs(specs: Iterable[TensorSpec], expected: Mapping[str, tuple[int, ...]]) -> None:
    """RefitError, naming tensors, unless exactly `expected` (name to shape) is announced, each once."""
    specs, dtypes = list(specs), get_args(DtypeName)
    counts = Counter(spec.name for spec in specs)
    refuse("listed more than once by the trainer", [name for name, count in counts.items() if count > 1])
    refuse("missing from what the trainer exports", expected.keys() - counts.keys())
    refuse("unknown to the model", counts.keys() - expected.keys())
    for spec in specs:
        check_shape(spec.name, spec.shape, expected)
        if spec.dtype not in dtypes:
            raise RefitError(f"refit: {spec.name} has dtype {spec.dtype}; expected one of {', '.join(dtypes)}")


def check_names(names: Iterable[str], expected: Container[str], before: Container[str]) -> None:
    """RefitError where a bucket has tensors that are not expected, or that came `before` or twice."""
    # Not with sets of all names: the time would be that of the whole model for each bucket.
    counts = Counter(names)
    refuse("unknown to the model", [name for name in counts if name not in expected])
    refuse("repeated", [name for name, count in counts.items() if count > 1 or name in before])


def check_shape(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> None:
    """RefitError where the tensor has another shape than is expected."""
    if shape != expected[name]:
        found = f"{name} has shape {list(shape)}; expected {list(expected[name])}"
        raise RefitError(f"refit: {found}. Do trainer and generator name one model?")


def check_digests(found: Mapping[str, int], claimed: Mapping[str, int]) -> None:
    """RefitError where a tensor is not what the trainer says of it."""
    refuse("changed on the way, by their digests", [name for name in claimed if found.get(name) != claimed[name]])


def refuse(problem: str, names: Iterable[str]) -> None:
    """RefitError if there are any such tensors."""
    if found := sorted(names):
        raise RefitError(f"refit: {len(found)} tensor(s) {problem}: {listed(found, _MAX_NAMED)}")
