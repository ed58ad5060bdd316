"""The kinds of devices that a plan knows, and how a number of them is written."""

import re

from attrs import frozen

from rlcore.schema.suggestions import did_you_mean
from rlcore.spi import ConfigError, DeviceSpec, Problem

GIB = 2**30
PATH = "--gpus"

DEVICES = {
    device.name: device
    for device in (
        DeviceSpec(
            name="H100",
            memory_bytes=int(79.6 * GIB),
            flops=989e12,
            float8_flops=1979e12,
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
            host=40e9,
            devices_per_node=8,
        ),
        DeviceSpec(
            name="H200",
            memory_bytes=int(140.4 * GIB),
            flops=989e12,
            float8_flops=1979e12,
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            host=40e9,
            devices_per_node=8,
        ),
        DeviceSpec(
            name="GB200",
            memory_bytes=int(185 * GIB),
            flops=2500e12,
            float8_flops=5000e12,
            bandwidth=8e12,
            link=900e9,
            network=50e9,
            host=200e9,
            devices_per_node=4,
        ),
    )
}
"""By name. NVIDIA's data sheets: SXM modules, dense bfloat16 and dense float8, which are half of the figures with sparsity that
the sheets have (3,958 TFLOP/s in float8 of an H100 and an H200, 720 PFLOP/s of the 72 devices of a GB200 NVL72), NVLink in one
direction, one 400 Gbit/s adapter a device; memory as the driver reports it; the host's rate as state moved in measured runs,
and for GB200 half of NVLink-C2C's."""


@frozen(kw_only=True)
class Devices:
    """Equal devices on equal machines."""

    spec: DeviceSpec
    nodes: int
    per_node: int

    @property
    def number(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node} {self.spec.name}"


def parse_devices(text: str, nodes: int | None) -> Devices:
    """ "8xH100" on so many machines: without `nodes`, as many machines as hold them all; with it, so many on each machine.

    ConfigError for another form, a kind that is not known, or a number that does not fill the machines.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?([A-Za-z][\w-]*)\s*", text)
    if match is None or match[1] == "0":
        raise _error(f'"{text}"', 'a number and a kind, such as "8xH100"')
    number, kind = int(match[1] or 1), match[2].upper()
    spec = DEVICES.get(kind)
    if spec is None:
        raise _error(f'"{match[2]}"', f"one of {', '.join(DEVICES)}{did_you_mean(kind, DEVICES)}")
    if nodes is not None:
        if number > spec.devices_per_node:
            raise _error(f"{number} on each machine", f"at most {spec.devices_per_node}, which a machine with {kind} has")
        return Devices(spec=spec, nodes=nodes, per_node=number)
    if number > spec.devices_per_node and number % spec.devices_per_node:
        raise _error(f"{number}", f"a multiple of {spec.devices_per_node}, which a machine with {kind} has, or fewer than that")
    per_node = min(number, spec.devices_per_node)
    return Devices(spec=spec, nodes=number // per_node, per_node=per_node)


def _error(found: str, expected: str) -> ConfigError:
    return ConfigError([Problem(path=PATH, found=found, expected=expected)])
