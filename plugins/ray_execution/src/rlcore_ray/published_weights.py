"""Weights of a refit in Ray's object store, from which engines without a trainer in their process read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from rlcore.execution import first_line
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


@define(eq=False)
class Publisher:
    """Puts the buckets of an export into Ray's store as they are read."""

    failure: str | None = field(default=None, init=False)
    """The reason why they are not there; None where they are."""
    _references: list[Any] = field(factory=list, init=False)
    _of: WeightExport | None = field(default=None, init=False)

    def published(self) -> PublishedWeights | None:
        """Return the weights of the export, once it has been read to its end; None where the store did not take them."""
        if self._of is None or self.failure is not None:
            return None
        return PublishedWeights(weight_version=self._of.weight_version, specs=self._of.specs, buckets=self._references)

    def watch(self, export: WeightExport) -> WeightExport:
        """Return the export, whose buckets are published as they are read."""
        self._of = export
        return evolve(export, buckets=self._buckets(export.buckets))

    def _buckets(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        import ray

        for bucket in buckets:
            if self.failure is None:
                try:
                    self._references.append(ray.put([(one.name, _on_host(one.tensor), one.digest) for one in bucket.tensors]))
                except Exception as error:  # the ranks wait for each other in the export: this one reads on
                    self.failure = first_line(error)
                    self._references.clear()
            yield bucket


def _on_host(tensor: Any) -> Any:
    """Return a copy of a tensor of any library in the host's memory: a view would bring all that it is a view of."""
    return tensor.detach().to("cpu", copy=True) if hasattr(tensor, "detach") else tensor
