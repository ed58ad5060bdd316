"""On Hopper TransformerEngine multiplies by all experts in one kernel, unless it is told otherwise."""

import os

import pytest

from rlcore_megatron.grouped_products import VARIABLE, multiply_by_all_experts_at_once


@pytest.mark.parametrize(
    ("capability", "found", "expected"),
    [((9, 0), None, "1"), ((9, 0), "0", "0"), ((8, 0), None, None), ((10, 0), None, None)],
)
def test_one_kernel_on_hopper(monkeypatch, capability, found, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    if found is not None:
        monkeypatch.setenv(VARIABLE, found)
    multiply_by_all_experts_at_once(capability)
    assert os.environ.get(VARIABLE) == expected
    monkeypatch.delenv(VARIABLE, raising=False)
