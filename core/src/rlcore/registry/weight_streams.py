"""Checks on weights while they pass from trainer to generator, bucket by bucket; nothing is kept but names and digests."""

import math
from collections.abc import Iterator, Mapping

from attrs import evolve

from rlcore.registry.checks import check_int
from rlcore.schema.listing import listed
from rlcore.spi.errors import ContractError, RefitError
from rlcore.spi.weights import ITEM_BYTES, NamedTensor, TensorSpec, WeightBucket, WeightExport

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


def checked(export: WeightExport, owner: str, max_bucket_bytes: int) -> WeightExport:
    """The same export, whose buckets raise ContractError where they do not bring exactly the specs, in their order."""
    return evolve(export, buckets=_checked_buckets(export, owner, max_bucket_bytes))


def recorded(export: WeightExport, digests: dict[str, int]) -> WeightExport:
    """The same export; the digest of each tensor that is taken is written into `digests`."""
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
    remaining = iter(export.specs)
    position = 0
    for bucket in export.buckets:
        if not isinstance(bucket, WeightBucket):
            raise ContractError(f"{owner}: export_weights brought a {type(bucket).__name__}; expected a WeightBucket")
        for tensor in bucket.tensors:
            spec = next(remaining, None)
            _check_name(owner, tensor, spec, export.specs[:position])
            position += 1
            _check_tensor(owner, tensor, export.specs[position - 1])
        _check_size(owner, export.specs[position - len(bucket.tensors) : position], max_bucket_bytes)
        yield bucket
    missing = [spec.name for spec in remaining]
    if missing:
        raise ContractError(f"{owner}: export_weights ended without {listed(missing, _MAX_NAMED)}")


def _recorded_buckets(buckets: Iterator[WeightBucket], digests: dict[str, int]) -> Iterator[WeightBucket]:
    for bucket in buckets:
        digests.update((tensor.name, tensor.digest) for tensor in bucket.tensors)
        yield bucket


def _check_name(owner: str, tensor: object, spec: TensorSpec | None, before: tuple[TensorSpec, ...]) -> None:
    if not isinstance(tensor, NamedTensor):
        raise ContractError(f"{owner}: export_weights brought a {type(tensor).__name__}; expected a NamedTensor")
    if spec is not None and tensor.name == spec.name:
        return
    repeated = any(tensor.name == earlier.name for earlier in before)
    expected = f"{spec.name} next" if spec else "no more tensors"
    raise ContractError(
        f"{owner}: export_weights brought {tensor.name}{' a second time' if repeated else ''}; expected {expected}"
    )


def _check_tensor(owner: str, tensor: NamedTensor, spec: TensorSpec) -> None:
    """Shape and dtype, read from whatever array type it is; the digest's range."""
    where = f"{owner}: export_weights brought {spec.name}"
    shape, dtype = getattr(tensor.tensor, "shape", None), getattr(tensor.tensor, "dtype", None)
    if tensor.tensor is None:
        raise ContractError(f"{where} as None; expected a tensor")
    if shape is not None and tuple(shape) != spec.shape:
        raise ContractError(f"{where} of shape {list(shape)}; expected {list(spec.shape)}")
    if dtype is not None and str(dtype).rpartition(".")[2] != spec.dtype:
        raise ContractError(f"{where} of {dtype}; expected {spec.dtype}")
    if type(tensor.digest) is not int or not 0 <= tensor.digest < 2**64:
        raise ContractError(f"{where} with digest {tensor.digest!r}; expected an int of 64 bits without sign")


def _check_size(owner: str, specs: tuple[TensorSpec, ...], max_bucket_bytes: int) -> None:
    size = sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in specs)
    if size > max_bucket_bytes and len(specs) > 1:
        raise ContractError(f"{owner}: export_weights brought a bucket of {size} bytes; expected at most {max_bucket_bytes}")
