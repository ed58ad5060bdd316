"""The filter of system calls, as the kernel would run it."""

import platform
from pathlib import Path

import pytest

from rlcore_code import system_calls
from rlcore_code.system_calls import ALLOW, ENOSYS, EPERM, ERRNO, KILL_PROCESS, OWN, call_filter, unsupported

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
OWN_PROCESS = 4321
HEADERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return request.param


def outcome(isolation, number, *arguments, architecture):
    """Run the filter on a call and return the kernel's action."""
    words = {0: number, 4: architecture} | {16 + 8 * place: value for place, value in enumerate(arguments)}
    program, at, loaded = call_filter(isolation), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        value = OWN_PROCESS if operand == OWN else operand
        at += 1
        if code == system_calls.LOAD:
            loaded = words.get(value, 0) & 0xFFFFFFFF
        elif code == system_calls.AND:
            loaded &= value
        elif code == system_calls.EQUAL:
            at += if_true if loaded == value else if_false
        else:
            return value


CASES = [
    ("read", (0, 63), (), ALLOW, ALLOW),
    ("execve", (59, 221), (), ALLOW, ALLOW),
    ("socket", (41, 198), (1, 1), ERRNO | ENOSYS, ERRNO | ENOSYS),
    ("io_uring_setup", (425, 425), (), ERRNO | ENOSYS, ERRNO | ENOSYS),
    ("of a later kernel", (5000, 5000), (), ERRNO | ENOSYS, ERRNO | ENOSYS),
    ("of the x32 interface", (0x40000000, 0x40000000), (), ERRNO | ENOSYS, ERRNO | ENOSYS),
    ("socketpair of AF_UNIX", (53, 199), (1, 1 | 0o2000000), ALLOW, ALLOW),
    ("socketpair of datagrams", (53, 199), (1, 2), ERRNO | EPERM, ERRNO | EPERM),
    ("socketpair of AF_VSOCK", (53, 199), (40, 1), ERRNO | EPERM, ERRNO | EPERM),
    ("clone of a thread", (56, 220), (0x3D0F00,), ALLOW, ALLOW),
    ("clone of a namespace", (56, 220), (0x10000011,), ERRNO | EPERM, ERRNO | EPERM),
    ("clone beside its parent", (56, 220), (0x8011,), ERRNO | EPERM, ERRNO | EPERM),
    ("prlimit of itself", (302, 261), (0,), ALLOW, ALLOW),
    ("prlimit of another", (302, 261), (77,), ERRNO | EPERM, ERRNO | EPERM),
    ("F_DUPFD_CLOEXEC", (72, 25), (0, 1030), ALLOW, ALLOW),
    ("F_SETOWN", (72, 25), (0, 8), ERRNO | EPERM, ERRNO | EPERM),
    ("PR_SET_PDEATHSIG", (157, 167), (1,), ERRNO | EPERM, ERRNO | EPERM),
    ("kill of another", (62, 129), (77,), ALLOW, ERRNO | EPERM),
    ("kill of all", (62, 129), (-1,), ALLOW, ERRNO | EPERM),
    ("kill of itself", (62, 129), (OWN_PROCESS,), ALLOW, ALLOW),
    ("tgkill of another", (234, 131), (77, 77), ALLOW, ERRNO | EPERM),
    ("chmod", (90, 53), (), ALLOW, ERRNO),
    ("utimensat", (280, 88), (), ALLOW, ERRNO),
    ("fallocate", (285, 47), (3, 0), ALLOW, ALLOW),
    ("fallocate beyond the size", (285, 47), (3, 1), ERRNO | EPERM, ERRNO | EPERM),
    ("msync", (26, 227), (), ALLOW, ALLOW),
    ("setsid", (112, 157), (), ALLOW, ERRNO | ENOSYS),
]


@pytest.mark.parametrize(
    ("numbers", "arguments", "in_namespaces", "in_limits"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_calls_are_allowed_or_refused(machine, numbers, arguments, in_namespaces, in_limits):
    number, architecture = (numbers[0], X86_64) if machine == "x86_64" else (numbers[1], AARCH64)
    assert outcome("namespaces", number, *arguments, architecture=architecture) == in_namespaces
    assert outcome("limits", number, *arguments, architecture=architecture) == in_limits


def test_calls_by_another_interface_end_the_process(machine):
    assert outcome("namespaces", 0, architecture=0x40000003) == KILL_PROCESS


def test_another_architecture_is_named(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "found a processor of the type riscv64; expected x86_64 or aarch64" in unsupported()


@pytest.mark.skipif(not all(header.exists() for header in HEADERS), reason="the kernel's headers are not installed")
def test_numbers_are_the_kernels():
    import re

    listed = [
        entry.split(":")
        for text in (
            system_calls.ALLOWED,
            system_calls.ALLOWED_IN_NAMESPACES,
            system_calls.CHANGES_OF_OWN_FILES,
            system_calls.RULED,
        )
        for entry in text.split()
    ]
    renamed = {"newfstatat": "fstatat", "fadvise64": "fadvise64"}
    for column, header in enumerate(HEADERS):
        found = {match[1]: match[2] for match in re.finditer(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())}
        for name, *numbers in listed:
            if column < len(numbers):
                assert numbers[column] == found.get(name, found.get(renamed.get(name, name))), name
