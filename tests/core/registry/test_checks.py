"""Weights on their way: an export brings exactly what it lists, checked while it is read."""

import attrs
import numpy as np
import pytest

from rlcore.registry.plugin_errors import owner_of
from rlcore.spi import ContractError, ExportWeightsRequest, NamedTensor, TensorSpec, WeightBucket, WeightExport, tensor_digest

REQUEST = ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=16)
A, B = np.arange(2, dtype=np.float32), np.ones((2, 1), np.float32)


def spec(name, array, dtype="float32"):
    return TensorSpec(name=name, shape=array.shape, dtype=dtype)


def named(name, array, **changes):
    return attrs.evolve(NamedTensor(name=name, tensor=array, digest=tensor_digest(array)), **changes)


BOTH = (spec("a", A), spec("b", B))


def export_of(parts, specs=BOTH, **changes):
    made = WeightExport(weight_version=0, specs=specs, buckets=iter(parts), persistent=False)
    return attrs.evolve(made, **changes)


def bucket(*tensors):
    return WeightBucket(tensors=tensors)


def read(make_trainer, export, request=REQUEST):
    trainer = make_trainer(export_weights=lambda self, request: export)
    return [tensor.name for part in trainer.export_weights(request).buckets for tensor in part.tensors]


def test_a_tensor_may_keep_the_models_own_dtype(make_trainer):
    narrow, specs = attrs.evolve(REQUEST, dtype="bfloat16"), (spec("a", A),)
    kept = tuple(attrs.evolve(each, keeps_dtype=True) for each in specs)
    assert read(make_trainer, export_of([bucket(named("a", A))], specs=kept), narrow) == ["a"]
    with pytest.raises(ContractError, match="expected bfloat16 as requested"):
        read(make_trainer, export_of([bucket(named("a", A))], specs=specs), narrow)


@pytest.mark.parametrize(
    "buckets", [[bucket(named("a", A), named("b", B))], [bucket(named("a", A)), bucket(), bucket(named("b", B))]]
)
def test_what_is_listed_passes(make_trainer, buckets):
    assert read(make_trainer, export_of(buckets)) == ["a", "b"]


def test_buckets_are_read_lazily(make_trainer):
    taken = []

    def buckets():
        for name, array in (("a", A), ("b", B)):
            taken.append(name)
            yield bucket(named(name, array))

    trainer = make_trainer(export_weights=lambda self, request: export_of(buckets()))
    export = trainer.export_weights(REQUEST)
    assert taken == []
    next(export.buckets)
    assert taken == ["a"]


def test_what_an_export_raises_under_way_is_the_trainers(make_trainer):
    """Its buckets are taken in the refit of a generator, which has no part in it."""

    def buckets():
        yield bucket(named("a", A))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        read(make_trainer, export_of(buckets()))
    assert raised.value.__notes__ == ["raised in export_weights of trainer 'fake' (in-process 0)"]
    assert owner_of(raised.value) == "trainer 'fake' (in-process 0)"


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        ([bucket(named("a", A))], "ended without b"),
        ([], "ended without a, b"),
        ([bucket(named("b", B), named("a", A))], "brought b; expected a next"),
        ([bucket(named("a", A)), bucket(named("a", A))], "brought a a second time; expected b next"),
        ([bucket(named("a", A)), bucket(named("b", B)), bucket(named("c", A))], "brought c; expected no more tensors"),
        ([bucket(named("a", A)), bucket(named("b", B)), bucket(named("a", A))], "a a second time; expected no more tensors"),
        ([bucket(named("a", A[:1]))], "brought a of shape [1]; expected [2]"),
        ([bucket(named("a", A.astype(np.float16)))], "brought a of float16; expected float32"),
        ([bucket(named("a", A, tensor=None))], "brought a as None"),
        ([bucket(named("a", A, digest=-1))], "with digest -1; expected an int of 64 bits"),
        ([bucket(named("a", A, digest=2**64))], "expected an int of 64 bits"),
        ([bucket(A)], "brought a ndarray; expected a NamedTensor"),
        ([named("a", A)], "brought a NamedTensor; expected a WeightBucket"),
    ],
)
def test_whatever_differs_from_the_list_is_named(make_trainer, buckets, text):
    with pytest.raises(ContractError) as raised:
        read(make_trainer, export_of(buckets))
    assert text in str(raised.value)
    assert str(raised.value).startswith("trainer 'fake' (in-process 0): export_weights ")


def test_torch_dtypes_are_understood(make_trainer):
    class Tensor:
        shape = (2,)
        dtype = "torch.bfloat16"

    export = export_of([bucket(NamedTensor(name="a", tensor=Tensor(), digest=0))], (spec("a", A, "bfloat16"),))
    assert read(make_trainer, export, attrs.evolve(REQUEST, dtype="bfloat16")) == ["a"]


def test_a_bucket_over_the_limit_is_refused_unless_it_is_one_tensor(make_trainer):
    small = attrs.evolve(REQUEST, max_bucket_bytes=7)
    assert read(make_trainer, export_of([bucket(named("a", A)), bucket(named("b", B))]), small) == ["a", "b"]
    with pytest.raises(ContractError, match="16 bytes.*at most 7"):
        read(make_trainer, export_of([bucket(named("a", A), named("b", B))]), small)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"specs": ()}, "specs: found no tensors"),
        ({"specs": [spec("a", A)]}, "specs: found a list; expected a tuple"),
        ({"specs": (spec("a", A), spec("a", A))}, "specs: a is listed twice"),
        ({"specs": (A,)}, "specs: found a ndarray; expected a TensorSpec"),
        ({"specs": (spec("a", A, "int8"),)}, "specs: a is of 'int8'"),
        ({"specs": (spec("a", A, "bfloat16"),)}, "specs: a is of bfloat16; expected float32 as requested"),
        ({"specs": (TensorSpec(name="a", shape=(-1,), dtype="float32"),)}, "shape of a: found -1"),
        ({"weight_version": 1}, "weight_version: found 1; expected 0"),
        ({"persistent": 1}, "persistent: found 1"),
        ({"buckets": [bucket()]}, "buckets: found a list; expected an iterator"),
    ],
)
def test_a_wrong_export_is_refused_before_it_is_read(make_trainer, changes, text):
    with pytest.raises(ContractError) as raised:
        read(make_trainer, export_of([], **changes))
    assert text in str(raised.value)
