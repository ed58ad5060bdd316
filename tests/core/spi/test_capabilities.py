"""The names that providers declare."""

import pytest

from rlcore.spi import capabilities


def test_capability_constants_and_the_known_set_agree():
    constants = {value for name, value in vars(capabilities).items() if name.isupper() and isinstance(value, str)}
    assert constants == capabilities.KNOWN


@pytest.mark.parametrize(
    ("name", "is_known"), [("entropy", True), ("refit.pipe", True), ("acme:x", True), ("entropi", False), ("refits", False)]
)
def test_known_names(name, is_known):
    assert capabilities.is_known(name) is is_known
