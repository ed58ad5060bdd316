"""Programs are held to each line of the table in docs/environments.md, in both isolations, as both users."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from rlcore_code.sandbox import Sandbox

from .sandboxes import CONFIG, EVERY, ORDINARY, evolve, named, needs_namespaces, run

IN_NAMESPACES = [one for one in EVERY if one[0] == "namespaces"]
only_in_namespaces = pytest.mark.parametrize("isolated", IN_NAMESPACES, ids=" of ".join, indirect=True)
in_limits = pytest.mark.parametrize("isolated", [one for one in EVERY if one[0] == "limits"], ids=" of ".join, indirect=True)
TRY = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, function, *arguments):
    try:
        result = function(*arguments)
    except (OSError, ValueError, AttributeError):
        return
    if result != -1:
        print(name, "is allowed", flush=True)
"""
"""A prefix with which programs print the calls that the sandbox allowed."""


def test_it_reads_its_input_and_writes_output(isolated):
    execution = isolated.run("import sys\nprint(input(), sys.argv[1:], __name__)", stdin="Grüße\n")
    assert execution.output.decode() == "Grüße [] __main__\n"
    assert execution.exit_code == 0
    assert not execution.timed_out


@pytest.mark.parametrize(
    ("program", "code"), [("1/0", 1), ("import sys; sys.exit(3)", 3), ("x =", 1), ("\0", 1), ("\ud800", 1)]
)
def test_a_failure_is_an_exit_code(program, code):
    needs_namespaces()
    assert run(program).exit_code == code


def test_the_library_works(isolated):
    program = """
        import asyncio, concurrent.futures, ctypes, decimal, hashlib, json, locale, mmap
        import multiprocessing, sqlite3, ssl, subprocess, zlib
        async def own():
            return await asyncio.to_thread(sum, [1, 2])
        print(asyncio.run(own()), hashlib.sha256(b"").hexdigest()[:4])
        with open("own.txt", "w") as file:
            file.write("x")
        with open("own.txt", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped.flush()
        locale.setlocale(locale.LC_ALL, "")
        print(sqlite3.connect(":memory:").execute("select 1").fetchone())
    """
    assert isolated.run(program, max_processes=8).output.decode() == "3 e3b0\n(1,)\n"


def test_it_may_start_processes_of_its_own():
    program = """
        import os, signal, subprocess, sys
        sleeping = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        sleeping.terminate()
        print(sleeping.wait())
    """
    needs_namespaces()
    assert run(program).output == b"-15\n"


# What it sees.


def test_it_sees_no_files_but_its_own_and_python(isolated, tmp_path):
    if isolated.isolation == "limits" and not has_landlock():
        pytest.skip("the kernel has no Landlock, which bounds what programs read without namespaces")
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    (tmp_path / "open").write_text("43")
    tmp_path.chmod(0o755)
    paths = [
        str(secret),
        "/usr/bin/passwd",
        "/usr/include/stdio.h",
        "/usr/share/doc",
        "/etc/passwd",
        "/etc/hostname",
        "/bin/sh",
    ]
    paths += [
        "/proc/self/environ",
        "/proc/1/cmdline",
        "/dev/shm",
        "/tmp",
        "/sys",
        "/run",
        "/root/.ssh",
        "/home",
        "/var",
        "/opt",
    ]
    program = f"""
        import os
        for path in {paths!r}:
            try:
                print(path, len(os.listdir(path)) if os.path.isdir(path) else len(open(path).read()))
            except OSError:
                pass
        print(sorted(os.listdir(".")), os.environ.get("USER"))
    """
    assert isolated.run(program).output.decode() == "['main.py'] None\n"


@only_in_namespaces
def test_nothing_of_the_system_is_there_but_python(isolated):
    """The packages of the recipe's interpreter are there too."""
    program = """
        import os, stat, sys
        PACKAGES = [path for path in sys.path if path.endswith("-packages")]
        library = os.path.dirname(os.__file__)
        for folder, folders, files in os.walk("/"):
            if folder.startswith((library, "/usr/share/zoneinfo", "/usr/lib/locale/C.utf8", "/dev", "/box", *PACKAGES)):
                folders.clear()
                continue
            for file in files:
                path = os.path.join(folder, file)
                status = os.stat(path)
                if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                    print("setuid", path)
                if ".so" not in file and "python" not in file and file != "ld.so.cache":
                    print("seen", path)
        print(len(PACKAGES), os.path.isdir(library + "/site-packages") and os.listdir(library + "/site-packages"))
    """
    output = isolated.run(program).output.decode()
    assert output in ("0 []\n", "0 False\n") or "python" in isolated.options


@only_in_namespaces
def test_folders_that_are_named_readable_are_seen_and_no_more(isolated, tmp_path):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "data").write_text("seen")
    (tmp_path / "other").write_text("secret")
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest" in str(folder):  # those of pytest and its workers
            folder.chmod(0o755)
    program = f"import os\nprint(os.listdir({str(tmp_path)!r}), open({str(tmp_path / 'shown' / 'data')!r}).read())"
    assert isolated.run(program, readable=(tmp_path / "shown",)).output.decode() == "['shown'] seen\n"


def test_it_writes_nowhere_but_in_its_folder(isolated):
    if isolated.isolation == "limits" and not has_landlock():
        pytest.skip("the kernel has no Landlock, which bounds what programs write without namespaces")
    program = """
        import json, os, sys
        open("own.txt", "w").write("x")
        for folder in ["/", "/usr", "/dev", "/dev/shm", "/tmp", "/var/tmp", "/run", os.path.dirname(json.__file__), ".."]:
            try:
                open(folder + "/x", "w")
                print(folder)
            except OSError:
                pass
        for path in [json.__file__, sys.executable]:
            try:
                open(path, "r+")
                print(path)
            except OSError:
                pass
    """
    execution = isolated.run(program)
    assert (execution.output, execution.exit_code) == (b"", 0)


# Whom it reaches.


def test_it_has_no_socket_of_any_family(isolated):
    program = (
        TRY
        + """
import socket
for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for protocol in (0, 1, 6, 15):
            attempt(f"socket {family} {kind}", libc.socket, family, kind, protocol)
        if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM):
            attempt(f"socketpair {family} {kind}", libc.socketpair, family, kind, 0, (ctypes.c_int * 2)())
ours, theirs = socket.socketpair()
ours.send(b"x")
attempt("bind", libc.bind, ours.fileno(), b"\\1\\0\\0own", 6)
attempt("connect", libc.connect, ours.fileno(), b"\\1\\0\\0own", 6)
print(theirs.recv(1))
"""
    )
    assert isolated.run(program).output == b"b'x'\n"


@only_in_namespaces
def test_it_reaches_no_network(isolated):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        execution = isolated.run(f"import socket\nsocket.create_connection({address!r}, timeout=5)")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert execution.exit_code == 1


REFUSED_FUNCTIONS = """
attempt("semget", libc.semget, 0, 4, 0o1600)
attempt("msgget", libc.msgget, 0, 0o1600)
attempt("shmget", libc.shmget, 0, 4096, 0o1600)
attempt("mq_open", libc.mq_open, b"/own", os.O_CREAT | os.O_RDWR, 0o600, None)
attempt("sem_open", lambda: libc.sem_open(b"/own", os.O_CREAT, 0o600, 1) or -1)
attempt("shm_open", libc.shm_open, b"/own", os.O_CREAT | os.O_RDWR, 0o600)
attempt("memfd_create", libc.memfd_create, b"own", 0)
attempt("eventfd", libc.eventfd, 0, 0)
attempt("inotify_init", libc.inotify_init)
attempt("timerfd_create", libc.timerfd_create, 1, 0)
attempt("flock", libc.flock, 0, 1)
attempt("F_SETOWN", libc.fcntl, 0, 8, os.getppid())
attempt("F_SETLK", libc.fcntl, 0, 6, bytes(64))
attempt("F_SETLEASE", libc.fcntl, 0, 1024, 0)
attempt("F_SETPIPE_SZ", libc.fcntl, os.pipe()[0], 1031, 1 << 20)
attempt("TIOCSTI", libc.ioctl, 0, 0x5412, b"x")
attempt("unshare", libc.unshare, 0x10000000)
attempt("setns", libc.setns, 0, 0)
attempt("mount", libc.mount, b"none", b"/", b"", 32, b"")
attempt("chroot", libc.chroot, b".")
attempt("ptrace", libc.ptrace, 0, 0, 0, 0)
attempt("process_vm_readv", libc.process_vm_readv, os.getpid(), None, 0, None, 0, 0)
attempt("setpriority", libc.setpriority, 2, os.getuid(), 19)
attempt("nice", os.nice, 1)
attempt("sched_setaffinity", os.sched_setaffinity, 0, {0})
attempt("sched_setscheduler", libc.sched_setscheduler, os.getppid(), 3, bytes(4))
attempt("prlimit", libc.prlimit, os.getppid(), 0, None, (ctypes.c_ulong * 2)())
attempt("PR_SET_PDEATHSIG", libc.prctl, 1, 0, 0, 0, 0)
attempt("PR_SET_DUMPABLE", libc.prctl, 4, 1, 0, 0, 0)
attempt("PR_SET_CHILD_SUBREAPER", libc.prctl, 36, 1, 0, 0, 0)
attempt("setuid", libc.setresuid, 0, 0, 0)
attempt("clone of a namespace", libc.syscall, {"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0)
"""
NUMBERS = {
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "memfd_secret": (447, 447),
    "futex_waitv": (449, 449),
    "a call of a later kernel": (2000, 2000),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "seccomp": (317, 277),
    "fanotify_init": (300, 262),
    "rt_sigqueueinfo": (129, 138),
    "vmsplice": (278, 75),
    "kcmp": (312, 272),
    "name_to_handle_at": (303, 264),
}
"""System calls by their numbers on x86_64 and aarch64."""


def test_it_makes_no_call_that_reaches_further(isolated):
    machine = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    calls = {name: numbers[machine] for name, numbers in NUMBERS.items()}
    direct = f"""
for name, number in {calls!r}.items():
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38:
        print(name, "is known", flush=True)
print("done")
"""
    assert isolated.run(TRY + REFUSED_FUNCTIONS + direct).output == b"done\n"


@only_in_namespaces
def test_no_signal_reaches_the_process_that_keeps_its_time(isolated):
    program = """
        import os, signal
        for number in range(1, 65):
            try:
                os.kill(os.getppid(), number)
                os.kill(1, number)
            except OSError:
                pass
        print("alive")
    """
    execution = isolated.run(program)
    assert (execution.output, execution.exit_code) == (b"alive\n", 0)


@in_limits
def test_it_signals_nothing_but_itself(isolated):
    """Neither its launcher, nor a program beside it, nor a group: none that is there, which the filter refuses before."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as beside:
        program = f"""
            import errno, os, signal
            for pid in (os.getppid(), {beside.pid}, -{2**30 - 1}):
                for number in (0, 2, 15, 10, 17, 19, 34, 9):
                    try:
                        os.kill(pid, number)
                        print("signalled", pid)
                    except OSError as error:
                        if error.errno != errno.EPERM:
                            print(pid, error)
            signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
            signal.raise_signal(signal.SIGUSR1)
        """
        execution = isolated.run(program)
        alive = beside.poll() is None and psutil.Process(beside.pid).status() != psutil.STATUS_STOPPED
        beside.kill()
    assert (execution.output, execution.exit_code, alive) == (b"heard\n", 0, True)


def test_it_writes_no_report(isolated):
    program = """
        import os
        for fd in range(2, 32):
            for line in (b'{"exit": 0, "cpu_time_s": 0.0, "timed_out": false}', b'{"refused": "own"}'):
                try:
                    os.write(fd, line + bytes([10]))
                except OSError:
                    pass
        os._exit(7)
    """
    assert isolated.run(program).exit_code == 7


def test_it_is_not_root_and_cannot_be(isolated):
    program = TRY + 'print(os.getuid() != 0, os.geteuid() != 0)\nattempt("setuid", os.setuid, 0)'
    assert isolated.run(program).output == b"True True\n"


# What it takes.


@only_in_namespaces
def test_a_fork_bomb_stays_small_and_ends(isolated):
    program = """
        import os, sys
        forked = 0
        while True:
            try:
                if os.fork() == 0:
                    while True:
                        try:
                            os.fork()
                        except OSError:
                            os.execv(sys.executable, [sys.executable, "-Sc", "import time; time.sleep(600)", "rlcore-bomb"])
                forked += 1
            except OSError:
                break
        print(forked)
    """
    execution = isolated.run(program, max_processes=4)
    assert 1 <= int(execution.output) <= 3
    assert not named("rlcore-bomb")


@only_in_namespaces
def test_threads_are_counted_too(isolated):
    program = """
        import threading, time
        started = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
                started += 1
        except RuntimeError:
            print(started)
    """
    assert isolated.run(program, max_processes=3).output == b"2\n"


LEFT = """
    import os, sys
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", "rlcore-left"])
        os._exit(0)
    print("done", flush=True)
    os.kill(os.getpid(), 9)
"""


def test_it_leaves_no_process_behind(isolated):
    execution = isolated.run(LEFT, max_processes=8)
    assert (execution.output, execution.exit_code) == (b"done\n", -signal.SIGKILL)
    assert not execution.timed_out
    assert not named("rlcore-left")


@only_in_namespaces
def test_all_its_files_together_fit_the_limit(isolated):
    program = """
        import errno
        try:
            for index in range(100):
                open(f"{index}", "wb").write(bytes(2**18))
        except OSError as error:
            print(errno.errorcode[error.errno], 1 <= index <= 8)
        try:
            for index in range(10000):
                open(f"empty-{index}", "wb")
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    assert isolated.run(program).output == b"ENOSPC True\nENOSPC\n"


@in_limits
@pytest.mark.parametrize("written", ["bytes(2**18)", "b''"], ids=["bytes", "files"])
def test_too_many_files_end_it(isolated, written):
    program = f"""
        import time
        print("started", flush=True)
        for index in range(4000):
            open(f"{{index}}", "wb").write({written})
        time.sleep(600)
    """
    execution = isolated.run(program)
    assert (execution.output, execution.exit_code, execution.timed_out) == (b"started\n", None, False)


REMOVED = {
    "open": "kept.append(file); os.unlink(name)",
    "without a name": "kept.append(os.open('.', os.O_TMPFILE | 2)); os.write(kept[-1], bytes(2**19)); os.unlink(name)",
    "replaced": "kept.append(file); os.rename(name, 'same')",
    "mapped": "kept.append(mmap.mmap(file, 4096)); os.unlink(name); os.close(file)",
    "in a child": "os.unlink(name); os.fork() or time.sleep(600); os.close(file)",
}


@in_limits
@pytest.mark.parametrize("use", REMOVED)
def test_removed_files_that_it_uses_count(isolated, use):
    program = f"""
        import mmap, os, time
        print("started", flush=True)
        kept = []
        for number in range(8):
            name = str(number)
            file = os.open(name, os.O_CREAT | os.O_RDWR)
            os.write(file, bytes(2**19))
            {REMOVED[use]}
        time.sleep(600)
    """
    execution = isolated.run(program, max_processes=5000)
    assert (execution.output, execution.exit_code, execution.timed_out) == (b"started\n", None, False)


@in_limits
def test_a_removed_file_that_fits_is_its_own(isolated):
    program = """
        import tempfile, time
        with tempfile.TemporaryFile() as file:
            file.write(bytes(2**19))
            file.flush()
            time.sleep(0.2)
        print("done")
    """
    assert isolated.run(program).output == b"done\n"


@in_limits
def test_it_takes_no_space_beyond_the_size_of_a_file(isolated):
    program = (
        TRY
        + """
file = os.open("own", os.O_CREAT | os.O_RDWR)
attempt("fallocate", libc.fallocate, file, 1, ctypes.c_long(0), ctypes.c_long(2**26))
os.posix_fallocate(file, 0, 4096)
print(os.fstat(file).st_blocks * 512)
"""
    )
    assert isolated.run(program).output == b"4096\n"


def test_it_changes_no_rights_and_times_of_files_beside_its_own(isolated, tmp_path):
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    other = tmp_path / "other"
    other.write_text("x")
    other.chmod(0o600)
    os.utime(other, (1, 1))
    if isolated.options.get("python") and os.geteuid() == 0:
        os.chown(other, ORDINARY, ORDINARY)
    program = f"""
        import os, shutil
        open("own", "w").write("x")
        shutil.copy2("own", "copied")
        for change in (lambda path: os.chmod(path, 0o777), lambda path: os.utime(path, (9, 9))):
            try:
                change({str(other)!r})
            except OSError:
                pass
        print(sorted(os.listdir(".")))
    """
    assert isolated.run(program).output == b"['copied', 'main.py', 'own']\n"
    status = other.stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o600, 1)


@in_limits
def test_its_folder_has_no_folders(isolated):
    """Nobody has to clear up what is nested deeply."""
    assert isolated.run(TRY + 'attempt("mkdir", os.mkdir, "own")').output == b""


def test_it_cannot_take_all_memory(isolated):
    program = """
        import mmap
        for take in (lambda: bytearray(2**28), lambda: mmap.mmap(-1, 2**28), lambda: [0] * 2**26):
            try:
                taken = take()
            except (MemoryError, OSError):
                print("refused")
    """
    assert isolated.run(program).output == b"refused\n" * 3


def test_one_file_fits_the_limit(isolated):
    program = """
        import os
        try:
            open("big", "wb").write(bytes(2**22))
        except OSError:
            print("refused")
        try:
            os.write(0, b"x")
        except OSError:
            print("refused")
    """
    assert isolated.run(program).output == b"refused\nrefused\n"


def test_a_limit_cannot_be_raised(isolated):
    program = """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)
            except (OSError, ValueError):
                print("refused")
    """
    assert isolated.run(program).output == b"refused\n" * 4


IGNORING = (
    "import signal\nfor number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGALRM): signal.signal(number, signal.SIG_IGN)\n"
)
SPARING = "import signal, os\nsignal.signal(signal.SIGXCPU, lambda *_: os._exit(0))\n"


@pytest.mark.parametrize("beginning", ["", IGNORING, SPARING], ids=["plain", "ignoring", "with a handler"])
def test_a_loop_ends_by_its_processor_time(beginning):
    needs_namespaces()
    execution = run(f"{beginning}while True: pass", cpu_time_s=1)
    assert execution.timed_out
    assert execution.exit_code == -signal.SIGKILL


def test_what_waits_ends_by_the_clock(isolated):
    program = f"{IGNORING}import time\ntime.sleep(600)"
    execution = isolated.run(program, wall_time_s=0.5)
    assert execution.timed_out
    assert execution.exit_code is None


def test_one_that_ends_itself_has_not_run_out_of_time(isolated):
    execution = isolated.run("import os\nos.kill(os.getpid(), 9)")
    assert (execution.exit_code, execution.timed_out) == (-signal.SIGKILL, False)


def test_output_without_end_is_cut(isolated):
    execution = isolated.run("while True: print('x' * 1000)", max_output_kib=64)
    assert len(execution.output) == 64 * 1024
    assert execution.exit_code is None
    assert not execution.timed_out


# When it ends.

SLEEPS = "import os, sys\nos.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)', {word!r}])"


def test_a_call_that_is_cancelled_ends_the_program(isolated):
    async def check():
        running = Sandbox(evolve(CONFIG, **isolated.options)).run(
            {"main.py": SLEEPS.format(word="rlcore-cancelled")}, wall_time_s=600
        )
        task = asyncio.create_task(running)
        while not named("rlcore-cancelled"):
            assert not task.done(), task.result()
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not named("rlcore-cancelled")

    asyncio.run(check())


RUN = """
import asyncio, sys
from pathlib import Path
from rlcore_code.config import CodeConfig
from rlcore_code.sandbox import Sandbox
isolation, python, program = sys.argv[1:]
config = CodeConfig(isolation=isolation, python=Path(python) if python else None)
asyncio.run(Sandbox(config).run({"main.py": program}, wall_time_s=600))
"""


@pytest.mark.parametrize("isolated", [one for one in EVERY if one[1] == "root" or os.geteuid()], ids=" of ".join, indirect=True)
def test_a_run_that_is_killed_ends_its_programs(isolated):
    word = "rlcore-killed-run"
    program = textwrap.dedent(LEFT).replace("rlcore-left", word).replace("os.kill(os.getpid(), 9)", SLEEPS.format(word=word))
    command = [sys.executable, "-c", RUN, isolated.isolation, str(isolated.options.get("python", "")), program]
    with subprocess.Popen(command) as process:
        while not named(word) and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None
        process.kill()
    deadline = time.monotonic() + 300
    while named(word) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not named(word)


def has_landlock():
    """Return whether the kernel has Landlock."""
    import ctypes

    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) > 0
