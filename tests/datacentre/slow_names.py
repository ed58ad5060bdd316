"""Name server that knows the hosts and takes its time.

    python slow_names.py ADDRESS SECONDS NAME=ADDRESS...

Run by Python alone in the router's network; it ends with its standard input. It knows IPv4 addresses alone.
"""

import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping

PORT = 53
LIFE_S = 1
"""Seconds for which an answer may be kept."""


def answer(question: bytes, addresses: Mapping[str, str]) -> bytes:
    """Return the reply to a message with one question (RFC 1035, section 4)."""
    labels, place = [], 12
    while size := question[place]:
        labels.append(question[place + 1 : place + 1 + size].decode())
        place += 1 + size
    (kind,) = struct.unpack_from("!H", question, place + 1)
    address = addresses.get(".".join(labels)) if kind == 1 else None
    known = ".".join(labels) in addresses
    header = question[:2] + struct.pack("!5H", 0x8580 if known else 0x8583, 1, int(address is not None), 0, 0)
    reply = header + question[12 : place + 5]
    if address is not None:
        reply += struct.pack("!3HIH", 0xC00C, 1, 1, LIFE_S, 4) + socket.inet_aton(address)
    return reply


def serve(host: str, delay_s: float, addresses: Mapping[str, str]) -> None:
    """Answer each question `delay_s` seconds after it came, until standard input ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((host, PORT))
        print("ready", flush=True)

        def reply(question: bytes, sender: tuple[str, int]) -> None:
            time.sleep(delay_s)
            server.sendto(answer(question, addresses), sender)

        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            threading.Thread(target=reply, args=server.recvfrom(512), daemon=True).start()


if __name__ == "__main__":
    own, seconds, *names = sys.argv[1:]
    serve(own, float(seconds), dict(name.split("=", 1) for name in names))
