"""Checks on the values that plugins return; each raises an error that names the value.

Weights are checked while they pass from trainer to generator, bucket by bucket: nothing is kept but names and digests.
"""

import math
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from rlcore.registry.module_source import path_problem
from rlcore.registry.plugin_errors import SLOW, attributed, fault_of
from rlcore.schema.suggestions import listed
from rlcore.spi.arrays import Float32Array, Int64Array, check_array, check_range
from rlcore.spi.batch import TokenBatch
from rlcore.spi.errors import ContractError, NonFiniteError, RefitError
from rlcore.spi.loss import MISMATCH_METRICS
from rlcore.spi.weights import ITEM_BYTES, NamedTensor, TensorSpec, WeightBucket, WeightExport
from rlcore.time_limit import loading

TOLERANCE = 1e-4
"""Rounding error by which a log-probability may exceed 0, or an entropy fall below 0."""

_STEP_METRICS = (
    "step reward_mean reward_std success_rate response_length_mean response_length_max truncated_fraction loss grad_norm "
    "learning_rate weight_version updates tokens_per_second generated_tokens_per_second critic/loss critic/grad_norm "
    "critic/learning_rate"
)
OWN_METRICS = frozenset((*_STEP_METRICS.split(), *MISMATCH_METRICS))
"""Names in metrics.jsonl that no plugin's metric may have."""
OWN_PREFIXES = (
    *("async/", "checkpoint_eval/", "data/", "environment/", "eval/", "generation/"),
    *("memory/", "receipts/", "refit/", "reward/", "speculative/", "time/"),
)

RecordT = TypeVar("RecordT")


def check_record(value: object, expected: type[RecordT]) -> RecordT:
    """Return the value; ContractError unless it is a record of this class."""
    if not isinstance(value, expected):
        raise ContractError(f"found {_described(value)}; expected {_article(expected.__name__)}")
    return value


def check_int(name: str, value: object, *, at_least: int) -> int:
    """Return the value; ContractError unless it is a Python int of at least this size. A bool is refused."""
    if type(value) is not int:
        raise ContractError(f"{name}: found {_described(value)}; expected an int")
    if value < at_least:
        raise ContractError(f"{name}: found {value}; expected at least {at_least}")
    return value


def check_number(name: str, value: object) -> float:
    """Return the value as a float; an error unless it is a finite int or float. A bool, a tensor or an array is refused."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ContractError(f"{name}: found {_described(value)}; expected a float")
    if not math.isfinite(value):
        raise NonFiniteError(f"{name}: found {value}; expected a finite number")
    return float(value)


def check_metrics(name: str, values: object) -> None:
    """Raise unless the values are a mapping from names to finite numbers."""
    if not isinstance(values, Mapping):
        raise ContractError(f"{name}: found {_described(values)}; expected a mapping")
    for key, value in values.items():
        if not isinstance(key, str):
            raise ContractError(f"{name}: found the key {key!r}; expected a string")
        check_number(f"{name}[{key!r}]", value)


def check_own_names(name: str, values: Iterable[str]) -> None:
    """Raise if a plugin's metric has the name of one that the loop writes itself."""
    for key in values:
        if key in OWN_METRICS or key.startswith(OWN_PREFIXES):
            raise ContractError(f"{name}: found {key!r}, which the loop writes itself; expected another name")


def check_token_arrays(
    name: str,
    arrays: object,
    microbatches: Sequence[TokenBatch],
    dtype: str,
    *,
    lower: float = -math.inf,
    upper: float = math.inf,
    has_firsts: bool = False,
) -> tuple[Float32Array, ...]:
    """Return the arrays; an error unless each microbatch has one: [T] of the dtype, finite, within the bounds, and 0.0 at
    the first token of each sequence unless `has_firsts`."""
    if not isinstance(arrays, tuple):
        raise ContractError(f"{name}: found {_described(arrays)}; expected a tuple of arrays")
    if len(arrays) != len(microbatches):
        raise ContractError(f"{name}: found {len(arrays)} arrays; expected one for each of {len(microbatches)} microbatches")
    for index, (array, microbatch) in enumerate(zip(arrays, microbatches, strict=True)):
        where = f"{name} of microbatch {index}"
        check_array(where, array, dtype, microbatch.num_tokens)
        check_range(where, array, lower=lower, upper=upper)
        if not has_firsts:
            _check_first_tokens(where, array, microbatch.offsets)
    return arrays


def _check_first_tokens(where: str, array: Float32Array, offsets: Int64Array) -> None:
    firsts = array[offsets[:-1]]
    if firsts.any():
        worst = int(firsts.astype(bool).argmax())
        found = firsts[worst]
        raise ContractError(f"{where}: found {found} at the first token of sequence {worst}, which has none; expected 0.0")


def _described(value: object) -> str:
    return "None" if value is None else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


_MAX_NAMED = 5


def check_specs(export: WeightExport) -> None:
    """Raise ContractError unless the export lists tensors, each once, with a shape and a known dtype, and can be read."""
    if not isinstance(export.buckets, Iterator):
        raise ContractError(f"buckets: found a {type(export.buckets).__name__}; expected an iterator of WeightBucket")
    if not isinstance(export.specs, tuple) or not export.specs:
        found = "no tensors" if not export.specs else f"a {type(export.specs).__name__}"
        raise ContractError(f"specs: found {found}; expected a tuple with every tensor that the buckets bring")
    seen: set[str] = set()
    for spec in export.specs:
        if not isinstance(spec, TensorSpec):
            raise ContractError(f"specs: found a {type(spec).__name__}; expected a TensorSpec")
        if spec.name in seen:
            raise ContractError(
                f"specs: {spec.name} is listed twice; expected each tensor once, a tied one under its first name"
            )
        if spec.dtype not in ITEM_BYTES:
            raise ContractError(f"specs: {spec.name} is of {spec.dtype!r}; expected one of {', '.join(ITEM_BYTES)}")
        if not isinstance(spec.shape, tuple):
            raise ContractError(f"specs: shape of {spec.name}: found a {type(spec.shape).__name__}; expected a tuple of ints")
        for extent in spec.shape:
            check_int(f"specs: shape of {spec.name}", extent, at_least=0)
        seen.add(spec.name)


def checked_export(export: WeightExport, owner: str, max_bucket_bytes: int) -> WeightExport:
    """Wrap an export: its buckets raise ContractError unless they bring exactly its specs, in their order. Those of a sharded
    export must bring nothing."""
    if export.shards is not None:
        return evolve(export, buckets=_no_buckets(export, owner))
    return evolve(export, buckets=_checked_buckets(export, owner, max_bucket_bytes))


def recorded_export(export: WeightExport, digests: dict[str, int]) -> WeightExport:
    """Wrap an export: it writes the digest of each tensor that is read from it into `digests`."""
    return evolve(export, buckets=_recorded_buckets(export.buckets, digests))


def compare_digests(specs: tuple[TensorSpec, ...], sent: Mapping[str, int], held: Mapping[str, int]) -> None:
    """Raise RefitError, naming the tensors, unless everything was taken and exactly that is held."""
    if not isinstance(held, Mapping):
        raise ContractError(f"digests: found a {type(held).__name__}; expected a mapping from tensor names to digests")
    complaints = {
        "never taken from the export": [spec.name for spec in specs if spec.name not in sent],
        "not acknowledged": [name for name in sent if name not in held],
        "held with other values": [name for name in sent if name in held and held[name] != sent[name]],
        "acknowledged though never sent": [name for name in held if name not in sent],
    }
    found = [f"{listed(names, _MAX_NAMED)} {complaint}" for complaint, names in complaints.items() if names]
    if found:
        raise RefitError("; ".join(found))


def _checked_buckets(export: WeightExport, owner: str, max_bucket_bytes: int) -> Iterator[WeightBucket]:
    position = 0
    for bucket in _taken(export, owner):
        if not isinstance(bucket, WeightBucket):
            raise ContractError(f"{owner}: export_weights brought a {type(bucket).__name__}; expected a WeightBucket")
        for tensor in bucket.tensors:
            _check_tensor(owner, tensor, _checked_spec(owner, tensor, export.specs, position))
            position += 1
        _check_size(owner, export.specs[position - len(bucket.tensors) : position], max_bucket_bytes)
        yield bucket
    missing = [spec.name for spec in export.specs[position:]]
    if missing:
        raise ContractError(f"{owner}: export_weights ended without {listed(missing, _MAX_NAMED)}")


def _taken(export: WeightExport, owner: str) -> Iterator[WeightBucket]:
    """Yield the export's buckets, and attribute their errors to the trainer: the generator's refit reads them."""
    buckets = iter(export.buckets)
    while True:
        with attributed("raised in export_weights of", owner):
            try:
                bucket = next(buckets)
            except StopIteration:
                return
        yield bucket


def _no_buckets(export: WeightExport, owner: str) -> Iterator[WeightBucket]:
    for _ in _taken(export, owner):
        raise ContractError(f"{owner}: export_weights brought a bucket beside its shards; expected none")
    yield from ()


def _recorded_buckets(buckets: Iterator[WeightBucket], digests: dict[str, int]) -> Iterator[WeightBucket]:
    for bucket in buckets:
        digests.update((tensor.name, tensor.digest) for tensor in bucket.tensors)
        yield bucket


def _checked_spec(owner: str, tensor: object, specs: tuple[TensorSpec, ...], position: int) -> TensorSpec:
    """The spec at this position, which must have the tensor's name."""
    if not isinstance(tensor, NamedTensor):
        raise ContractError(f"{owner}: export_weights brought a {type(tensor).__name__}; expected a NamedTensor")
    spec = specs[position] if position < len(specs) else None
    if spec is not None and tensor.name == spec.name:
        return spec
    repeated = any(tensor.name == earlier.name for earlier in specs[:position])
    expected = f"{spec.name} next" if spec else "no more tensors"
    raise ContractError(
        f"{owner}: export_weights brought {tensor.name}{' a second time' if repeated else ''}; expected {expected}"
    )


def _check_tensor(owner: str, tensor: NamedTensor, spec: TensorSpec) -> None:
    """Raise unless shape and dtype, of any array type, equal the spec's and the digest is in range."""
    shape, dtype = getattr(tensor.tensor, "shape", None), getattr(tensor.tensor, "dtype", None)
    if tensor.tensor is None:
        found = "as None; expected a tensor"
    elif shape is not None and tuple(shape) != spec.shape:
        found = f"of shape {list(shape)}; expected {list(spec.shape)}"
    elif dtype is not None and str(dtype).rpartition(".")[2] != spec.dtype:
        found = f"of {dtype}; expected {spec.dtype}"
    elif type(tensor.digest) is not int or not 0 <= tensor.digest < 2**64:
        found = f"with digest {tensor.digest!r}; expected an int of 64 bits without sign"
    else:
        return
    raise ContractError(f"{owner}: export_weights brought {spec.name} {found}")


def _check_size(owner: str, specs: tuple[TensorSpec, ...], max_bucket_bytes: int) -> None:
    size = sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in specs)
    if size > max_bucket_bytes and len(specs) > 1:
        raise ContractError(f"{owner}: export_weights brought a bucket of {size} bytes; expected at most {max_bucket_bytes}")


def check_loss_path(path: object) -> None:
    """Raise ContractError where a path names no loss.

    The loss's module is not imported: it imports torch.
    """
    if problem := path_problem(path, quick=True):
        raise ContractError(f"loss.path: found {problem}; expected 'package.module:function' of one that can be imported")


def require_loss(path: str) -> None:
    """Import a loss where it is computed; ContractError where there is no such function."""
    try:
        with loading(f"the import of {path}", SLOW):
            found = pkgutil.resolve_name(path)
    except BaseException as error:  # whatever a module raises that is imported
        raise ContractError(f"the loss {path!r}, which the algorithm names, cannot be imported: {fault_of(error)}") from error
    if not callable(found):
        raise ContractError(f"the loss {path!r}, which the algorithm names, is a {type(found).__name__}; expected a function")
