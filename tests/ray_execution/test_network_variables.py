"""Ranks keep to the network by which Ray reaches their node."""

import os

import pytest

from rlcore_ray.network_variables import GLOO, VLLM, interface_of, set_network_variables

LOOPBACKS = ("lo", "lo0")


def test_the_interface_with_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") in LOOPBACKS
    assert interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("address", "before", "expected"),
    [
        ("127.0.0.1", {}, {}),
        ("192.0.2.1", {}, {VLLM: "192.0.2.1"}),
        ("192.0.2.1", {VLLM: "192.0.2.9", GLOO: "eth9"}, {VLLM: "192.0.2.9", GLOO: "eth9"}),
    ],
)
def test_variables_are_set_where_the_user_has_not(
    monkeypatch: pytest.MonkeyPatch, address: str, before: dict[str, str], expected: dict[str, str]
) -> None:
    import ray

    for name in (VLLM, GLOO):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    set_network_variables()
    assert {name: os.environ[name] for name in (VLLM, GLOO) if name in os.environ} == expected
