"""What a refit announces and brings is compared with what the model has."""

import pytest
from attrs import evolve

from rlcore.spi import RefitError, TensorSpec
from rlcore_torchkit.refit.arrivals import check_digests, check_names, check_specs

FIRST, SECOND = (
    TensorSpec(name="a", shape=(2, 3), dtype="float32"),
    TensorSpec(name="b", shape=(4,), dtype="bfloat16", keeps_dtype=True),
)
EXPECTED = {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((FIRST, SECOND, FIRST), "listed more than once by the trainer: a"),
        ((FIRST,), "missing from what the trainer exports: b"),
        ((FIRST, SECOND, evolve(FIRST, name="c")), "unknown to the model: c"),
        ((FIRST, evolve(SECOND, shape=(2, 2))), r"b has shape \[2, 2\]; expected \[4\]"),
        ((FIRST, evolve(SECOND, dtype="int8")), "b has dtype int8; expected one of float64, float32, "),
    ],
)
def test_what_is_not_the_models_is_named(specs, message):
    check_specs([FIRST, SECOND], EXPECTED)
    with pytest.raises(RefitError, match=message):
        check_specs(specs, EXPECTED)


@pytest.mark.parametrize(
    ("names", "message"), [("bb", "repeated: b"), ("ab", "repeated: a"), ("bc", "unknown to the model: c")]
)
def test_what_a_bucket_may_not_have_is_named(names, message):
    check_names("b", EXPECTED, {"a": 1})
    with pytest.raises(RefitError, match=message):
        check_names(names, EXPECTED, {"a": 1})


def test_what_changed_on_the_way_is_named():
    check_digests({"a": 1, "b": 2}, {"a": 1})
    for found in ({"a": 2}, {}):
        with pytest.raises(RefitError, match="changed .* digests: a"):
            check_digests(found, {"a": 1})
