"""Variables that keep a rank's libraries on the network by which Ray reaches its node."""

import os
from ipaddress import ip_address

import psutil

GLOO, VLLM = "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"


def set_network_variables() -> None:
    """Name the node's interface and address in the environment of this process, but where the user has.

    gloo otherwise looks the hostname up. Debian gives it a loopback address, at which ranks of other nodes find nobody. vLLM
    otherwise asks the routes for an address by which it would reach the internet.
    """
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if ip_address(address).is_loopback:  # one machine: process groups keep to the loopback interface themselves
        return
    os.environ.setdefault(VLLM, address)
    if (name := interface_of(address)) is not None:
        os.environ.setdefault(GLOO, name)


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface with an address; None where it has none, as behind a translation."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return str(name)
    return None
