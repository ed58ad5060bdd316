"""Runs one program under limits.

The sandbox starts this script as `python -I -S launcher.py`, with a request as JSON on its standard input. The program writes
to standard output. The launcher reports how the program ended as one line of JSON on standard error.

There are three processes. The launcher waits, and ends with the trainer. The keeper limits the time, and kills the processes
that the program leaves. Its child becomes the program.

With "namespaces" the keeper is the first process of a process namespace: the kernel kills all others with it. The program has
a private file system (Python, its library, a small writable folder) and no network. With "limits" all processes of a program
stay in its process group, which the keeper kills. A filter of system calls bounds both.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048
"""nosuid, nodev, noexec, noatime, nodiratime: flags that a remount in a user namespace has to keep."""
DETACH = 2
SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_FILTER = 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, equal on every architecture."""
NUM_RIGHTS = (0, 13, 14, 15, 15, 16)
"""Number of file rights in each version of Landlock; version 6 adds signals and abstract sockets."""
TO_READ, TO_READ_FILES, TO_REMOVE = 0b1101, 0b101, 0b10000
"""Landlock's rights: execute, read files and list folders; execute and read files; remove folders."""
PATH_BENEATH = 1
NOBODY = 65534
OWN_USERS = 1 << 30
"""First user id of the programs that root runs with "limits"; each has a separate user, so that none reaches another."""
BOX = "/box"
STAGE = "/proc"
"""The mount point of the new root: a folder that always exists and whose content the new root does not need."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_OPEN_FILES = 32
MAX_FILES = 1024
OWN_BYTES = 1 << 20
"""Bytes allowed in addition to the files, for the program's code and whole disk blocks."""
LOOK_S = 0.05
REFUSED = 3
SEALED = 0xF
"""Seals of a file in memory: no writes, no change of size, no further seals."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # the first process of a namespace receives only signals that it handles
    request = json.loads(sys.stdin.buffer.read())
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        os._exit(REFUSED)
    request["report"] = os.dup(2)  # the program does not inherit this copy
    with contextlib.suppress(OSError):
        write_text("/proc/self/oom_score_adj", "1000")  # where memory is short, programs end before the run
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
    request["user"] = NOBODY if was_root else None
    return run_keeper(request, signal.SIGKILL)


def run_limited(request: dict) -> int:
    os.chdir(request["folder"])
    write_files(request)
    request["user"] = own_user() if os.geteuid() == 0 else None
    return run_keeper(request, signal.SIGTERM)


def own_user() -> int:
    """Give the folder to a user that no other program has now, where this user namespace maps one."""
    for user in (OWN_USERS + os.getpid(), NOBODY):
        try:
            os.chown(".", user, user)
            return user
        except OSError:
            if user == NOBODY:
                raise
    raise AssertionError


def run_keeper(request: dict, with_launcher: int) -> int:
    """Fork the keeper, which receives this signal when the launcher ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    launcher = os.getpid()
    prctl(SET_DUMPABLE, 0)  # no other process may open its file descriptors
    keeper = os.fork()
    if keeper == 0:
        os.setsid()
        if request["isolation"] == "limits" and request["user"] is not None:
            libc.setfsgid(request["user"])  # only this user may list the open files of its processes
            libc.setfsuid(request["user"])
        prctl(SET_PDEATHSIG, with_launcher)
        if os.getppid() not in (launcher, 0):  # 0: the parent is in another namespace
            os._exit(REFUSED)
        guarded(keep, request)
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])


def guarded(body: Callable[[dict], None], request: dict) -> None:
    """Run the body of a forked process, which must not return into its parent's code."""
    try:
        body(request)
    except OSError as error:
        report(request, {"refused": str(error)})
        os._exit(REFUSED)
    finally:
        os._exit(0)


def report(request: dict, outcome: dict) -> None:
    os.write(request["report"], json.dumps(outcome).encode() + b"\n")


def keep(request: dict) -> None:
    """Start the program, wait until it ends or its time runs out, kill the processes that it left, and report the end."""
    prctl(SET_CHILD_SUBREAPER, 1)
    program = os.fork()
    if program == 0:
        guarded(become_program, request)
    ended = {"exit": None}
    try:
        ended = wait_for(program, request)
    finally:  # also without memory or access to the folder
        if ended["exit"] is None:
            os.kill(program, signal.SIGKILL)  # it has not been waited for, so the kernel has not reused its id
        if request["isolation"] == "limits":
            end_group(program)
    report(request, ended)


def wait_for(program: int, request: dict) -> dict:
    """Wait for the program and return its exit code; None where a limit ends it."""
    is_limited = request["isolation"] == "limits"
    deadline = time.monotonic() + request["wall_time_s"]
    while (left := deadline - time.monotonic()) > 0:
        if is_limited and is_overfull(request["disk_bytes"]):
            return {"exit": None, "cpu_time_s": 0.0, "timed_out": False}
        heard = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, min(left, LOOK_S) if is_limited else left)
        if is_limited and heard is not None and heard.si_signo == signal.SIGTERM:
            break  # the launcher has ended
        number = -1
        while number not in (0, program):
            number, status, used = os.wait4(-1, os.WNOHANG)
        if number == program:
            cpu_time_s = used.ru_utime + used.ru_stime
            return {"exit": os.waitstatus_to_exitcode(status), "cpu_time_s": cpu_time_s, "timed_out": False}
    return {"exit": None, "cpu_time_s": 0.0, "timed_out": True}


def is_overfull(disk_bytes: int) -> bool:
    """Return whether the working folder has too many or too large files, including removed files in use."""
    num_files, num_bytes = 0, removed_bytes(disk_bytes)
    with os.scandir(".") as entries:
        for entry in entries:
            num_files += 1
            with contextlib.suppress(OSError):
                num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
            if num_files > MAX_FILES:
                return True
    return num_bytes > disk_bytes + OWN_BYTES


def removed_bytes(disk_bytes: int) -> int:
    """Return the size of files that are removed from the working folder and in use by descendants of this process.

    A file that is mapped and not open has no readable size and counts as the largest.
    """
    folder, device = os.fsencode(os.getcwd()) + b"/", os.stat(".").st_dev
    found: dict[int, int] = {}
    processes = [str(os.getpid())]
    for process in processes:  # the loop adds their children
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in os.listdir(f"/proc/{process}/task"):
                processes += read(f"/proc/{process}/task/{thread}/children").decode().split()
        with contextlib.suppress(OSError):
            for line in read(f"/proc/{process}/maps").splitlines():
                if line.endswith(b" (deleted)") and folder in line:
                    found.setdefault(int(line.split()[4]), disk_bytes)
            for file in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{process}/fd/{file}")
                    if status.st_nlink == 0 and status.st_dev == device:
                        found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def end_group(program: int) -> None:
    """Kill the processes that the program left in its group, which this process adopted, and wait until they end."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program, signal.SIGKILL)
                os.waitpid(-1, 0)


def become_program(request: dict) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
    arguments = [request["python"], "-P", "-s", "-B", "-X", "utf8", *request["python_flags"], "main.py"]
    os.dup2(sealed(request["stdin"]), 0, inheritable=True)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2, inheritable=True)
    if request["user"] is not None:
        os.setgroups([])
        os.setresgid(*[request["user"]] * 3)
        os.setresuid(*[request["user"]] * 3)
    if request["isolation"] == "namespaces":
        # A user outside the namespace has no rights there, and the kernel counts its processes in this namespace alone.
        call("unshare", NEWUSER)
    prctl(SET_NO_NEW_PRIVS, 1)
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if request["isolation"] == "limits":
        restrict_files(request)
    limit(request)
    filter_calls(request["call_filter"])
    os.execve(request["python"], arguments, request["environment"])


def sealed(text: str) -> int:
    """Return a sealed file in memory that holds a text; it has no path for other processes."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "w", encoding="utf-8", errors="surrogatepass", newline="", closefd=False) as opened:
        opened.write(text)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALED)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def limit(request: dict) -> None:
    for name, most in {
        "RLIMIT_AS": request["memory_bytes"],
        "RLIMIT_FSIZE": request["disk_bytes"],
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": MAX_OPEN_FILES,
        "RLIMIT_NPROC": request["max_processes"],
        "RLIMIT_CPU": request["cpu_time_s"],  # no program can ignore the hard limit, which kills
    }.items():
        resource.setrlimit(getattr(resource, name), (most, most))


def filter_calls(instructions: list) -> None:
    """Refuse the system calls that a filter does not allow, in this process and its children."""
    own = {"own process": os.getpid()}
    code = b"".join(struct.pack("=HBBI", *numbers, own.get(operand, operand)) for *numbers, operand in instructions)
    content = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(content))
    call("prctl", SET_SECCOMP, ctypes.c_ulong(SECCOMP_FILTER), program, ctypes.c_ulong(0), ctypes.c_ulong(0))


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; below 1 where it has none."""
    return libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def restrict_files(request: dict) -> None:
    """Let this process read what Python needs, and write in its folder alone, where the kernel has Landlock."""
    version = landlock_version()
    if version < 1:
        return
    rights = (1 << NUM_RIGHTS[min(version, len(NUM_RIGHTS) - 1)]) - 1
    attributes = struct.pack("=QQQ", rights, 0, 3 if version >= 6 else 0)
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(24 if version >= 6 else 8), ctypes.c_uint32(0))
    for path in (*request["visible"], *DEVICES, "."):
        try:
            file = os.open(path, os.O_PATH)
        except OSError:  # this user has no access to it
            continue
        readable = TO_READ if os.path.isdir(path) else TO_READ_FILES
        allowed = rights & ~TO_REMOVE if path == "." else readable | (2 if path in DEVICES else 0)
        call("syscall", ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", allowed, file), ctypes.c_uint32(0))
        os.close(file)
    call("syscall", RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


def unshare(was_root: bool) -> None:
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (0 if was_root else NEWUSER))
    if not was_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            write_text(f"/proc/self/{name}", text)


def build_root(request: dict) -> None:
    """Make the new root, with Python read-only and BOX writable, and move into it."""
    mount("none", "/", "", REC | PRIVATE)
    mount("tmpfs", STAGE, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for source in (*request["visible"], *DEVICES):
        show(source)
    for folder in request["hidden"]:
        if os.path.isdir(STAGE + folder):
            mount("tmpfs", STAGE + folder, "tmpfs", READ_ONLY | NOSUID | NODEV, "size=4k,nr_inodes=1")
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
    """Mount an existing `source` read-only at the same path of the new root, unless it is already there."""
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


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode(), subject=target)


def prctl(option: int, value: int) -> None:
    call("prctl", option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def call(name: str, *arguments: object, subject: str = "") -> None:
    """Call a function of the C library. OSError names the function that failed, and its subject."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {subject}".rstrip() + f": {os.strerror(number)}")


if __name__ == "__main__":
    main()
