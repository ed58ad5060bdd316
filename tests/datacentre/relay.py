"""Relay that delays packets: it reads them from a TUN device and writes each back after a while.

    python relay.py DEVICE SECONDS

Run by Python alone in the router's network; it ends with its standard input. The router sends packets of hosts to the device,
and to their host once they are back.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from typing import IO, Any

MOST_BYTES = 65_535
"""Bytes of the largest packet."""
_TUNSETIFF = 0x400454CA
_PLAIN_TUN = 0x1001
"""Packets without a header of the device's own: IFF_TUN and IFF_NO_PI."""


def opened(device: str) -> int:
    """Make a TUN device that lasts as long as its file, and return that. OSError where the system refuses."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _PLAIN_TUN))
    return file


def relay(file: int, until: IO[Any], delay_s: float) -> None:
    """Give each packet back `delay_s` seconds after it came, in the order in which they came, until `until` ends."""
    waiting = deque[tuple[float, bytes]]()
    while True:
        due_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([file, until], [], [], due_s)
        if until in readable:
            return
        if readable:
            waiting.append((time.monotonic() + delay_s, os.read(file, MOST_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(file, waiting.popleft()[1])


if __name__ == "__main__":
    name, seconds = sys.argv[1:]
    tun = opened(name)
    print("ready", flush=True)
    relay(tun, sys.stdin, float(seconds))
