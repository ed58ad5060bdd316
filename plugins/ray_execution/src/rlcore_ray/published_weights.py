"""Weights of a refit in Ray's object store, from which engines without a trainer in their process read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve, frozen

from rlcore.spi import NamedTensor, TensorSpec, WeightBucket, WeightExport


@frozen(kw_only=True, eq=False)
class PublishedWeights:
    """An export that any process of the cluster can read, as often as it likes."""

    weight_version: int
    specs: tuple[TensorSpec, ...]
    buckets: Sequence[Any]
    """Ray's references to lists of names, tensors on the host and digests. The rank that has put them there owns them."""

    def export(self) -> WeightExport:
        """Return the export again; a bucket is read once it is taken."""
        return WeightExport(weight_version=self.weight_version, specs=self.specs, buckets=self._read(), persistent=False)

    def _read(self) -> Iterator[WeightBucket]:
        import ray

        for reference in self.buckets:
            tensors = ray.get(reference)
            yield WeightBucket(
                tensors=tuple(NamedTensor(name=name, tensor=one, digest=digest) for name, one, digest in tensors)
            )


def publishing(export: WeightExport) -> tuple[WeightExport, PublishedWeights]:
    """Return the export, and the weights that are published bucket by bucket as it is read to its end."""
    references: list[Any] = []
    published = PublishedWeights(weight_version=export.weight_version, specs=export.specs, buckets=references)
    return evolve(export, buckets=_published(export.buckets, references)), published


def _published(buckets: Iterator[WeightBucket], references: list[Any]) -> Iterator[WeightBucket]:
    import ray

    for bucket in buckets:
        references.append(ray.put([(one.name, _on_host(one.tensor), one.digest) for one in bucket.tensors]))
        yield bucket


def _on_host(tensor: Any) -> Any:
    """Return a tensor of any library in the host's memory, without the trainer's graph."""
    return tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
