"""Runs one program under limits.

It is a script of its own, started as `python -I -S launcher.py`, with a request as JSON on its standard input. The program's
output is its standard output; how the program ended is one line of JSON on standard error.

With "namespaces" the program has a file system of its own (Python, the system's libraries, a small writable folder), no
network, and no process but its own. Three processes: this one waits, the first of the new process namespace keeps the time, and
its child becomes the program; where the first one ends, the kernel ends all others.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
"""nosuid, nodev, noexec, noatime, nodiratime: what a remount in a user namespace must not take away."""
DETACH = 2
SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 36, 38
NOBODY = 65534
BOX = "/box"
STAGE = "/proc"
"""Where the new root is mounted before it becomes the root: a folder that is always there and holds nothing that it needs."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
MAX_OPEN_FILES = 32
REFUSED = 3

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    request["report"] = os.dup(2)  # which the program does not inherit
    try:
        code = run_isolated(request) if request["isolation"] == "namespaces" else run_limited(request)
    except OSError as error:
        report(request, {"refused": str(error)})
        code = REFUSED
    os._exit(code)


def run_isolated(request: dict) -> int:
    was_root = os.geteuid() == 0
    unshare(was_root)
    build_root(request)
    keeper = os.fork()
    if keeper == 0:
        prctl(SET_PDEATHSIG, signal.SIGKILL)
        prctl(SET_DUMPABLE, 0)
        guarded(keep_time, request, was_root)
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])


def run_limited(request: dict) -> int:
    prctl(SET_CHILD_SUBREAPER, 1)
    os.chdir(request["folder"])
    write_files(request)
    was_root = os.geteuid() == 0
    if was_root:
        os.chown(".", NOBODY, NOBODY)
    keep_time(request, was_root)
    end_descendants()
    return 0


def guarded(body: Callable[[dict, bool], None], request: dict, was_root: bool) -> None:
    """Run the body of a forked process, which must not return into its parent's code."""
    try:
        body(request, was_root)
    except OSError as error:
        report(request, {"refused": str(error)})
        os._exit(REFUSED)
    finally:
        os._exit(0)


def report(request: dict, outcome: dict) -> None:
    os.write(request["report"], json.dumps(outcome).encode() + b"\n")


def keep_time(request: dict, was_root: bool) -> None:
    """Start the program, wait for its end or that of its time, and report which it was."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    program = os.fork()
    if program == 0:
        guarded(become_program, request, was_root)
    deadline = time.monotonic() + request["wall_time_s"]
    while (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                report(request, {"exit": os.waitstatus_to_exitcode(ended[1])})
                return
    os.kill(program, signal.SIGKILL)
    report(request, {"exit": None})


def become_program(request: dict, was_root: bool) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    arguments = [request["python"], "-P", "-s", "-B", "-X", "utf8", *request["python_flags"], "main.py"]
    for number, path, flags in ((0, "stdin", os.O_RDONLY), (2, "/dev/null", os.O_WRONLY)):
        os.dup2(os.open(path, flags), number, inheritable=True)
    if was_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if request["isolation"] == "namespaces":
        # A user that no namespace knows has no rights there, and its processes are counted in this namespace alone.
        call("unshare", NEWUSER)
    prctl(SET_NO_NEW_PRIVS, 1)
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    limit(request)
    os.execve(request["python"], arguments, request["environment"])


def limit(request: dict) -> None:
    for name, most in {
        "RLIMIT_AS": request["memory_bytes"],
        "RLIMIT_FSIZE": request["disk_bytes"],
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NPROC": request["max_processes"],
    }.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    cpu_time_s = request["cpu_time_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_time_s, cpu_time_s + 1))  # SIGXCPU first, which tells it from other ends


def unshare(was_root: bool) -> None:
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (0 if was_root else NEWUSER))
    if not was_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            write_text(f"/proc/self/{name}", text)


def build_root(request: dict) -> None:
    """Make the new root, with Python and the system's libraries to be read and BOX to be written, and move into it."""
    mount("none", "/", "", REC | PRIVATE)
    with contextlib.suppress(OSError):  # segments outlive processes; kernels before 5.19 let no user switch them off
        write_text("/proc/sys/kernel/shmmni", "0")
    mount("tmpfs", STAGE, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for source in (*SYSTEM, *DEVICES, *request["visible"]):
        show(source)
    os.mkdir(STAGE + BOX)
    mount("tmpfs", STAGE + BOX, "tmpfs", NOSUID | NODEV, f"size={request['disk_bytes']},nr_inodes=1024,mode=777")
    os.chdir(STAGE + BOX)
    write_files(request)
    os.chdir(STAGE)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    mount("none", "/", "", REMOUNT | BIND | READ_ONLY | NOSUID | NODEV)
    os.chdir(BOX)


def show(source: str) -> None:
    """Let `source` be read at the same place of the new root, where it exists and is not there already."""
    target = STAGE + source
    if not os.path.exists(source) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    mount(source, target, "", BIND | REC)
    if source not in DEVICES:
        flags = os.statvfs(target).f_flag & KEPT_FLAGS
        mount("none", target, "", REMOUNT | BIND | READ_ONLY | NOSUID | flags)


def write_files(request: dict) -> None:
    for name, text in request["files"].items():
        write_text(name, text)
        os.chmod(name, 0o644)


def write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)


def end_descendants() -> None:
    """Kill what the program has left behind, which became this process's children."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode(), told=target)


def prctl(option: int, value: int) -> None:
    call("prctl", option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def call(name: str, *arguments: object, told: str = "") -> None:
    """A function of the C library. OSError says which one failed."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {told}".rstrip() + f": {os.strerror(number)}")


if __name__ == "__main__":
    main()
