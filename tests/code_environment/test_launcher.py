"""What a program in namespaces cannot do. Each runs for real; they are skipped where the kernel refuses namespaces."""

import asyncio
import os
import signal
import socket

import psutil
import pytest

from rlcore_code.sandbox import Sandbox

from .sandboxes import CONFIG, needs_namespaces, run


@pytest.fixture(autouse=True, scope="module")
def _namespaces():
    needs_namespaces()


def test_it_reads_its_input_and_writes_output():
    execution = run("import sys\nprint(input(), sys.argv[1:], __name__)", stdin="Grüße\n")
    assert execution.output.decode() == "Grüße [] __main__\n"
    assert execution.exit_code == 0
    assert not execution.timed_out


@pytest.mark.parametrize(
    ("program", "code"), [("1/0", 1), ("import sys; sys.exit(3)", 3), ("x =", 1), ("\0", 1), ("\ud800", 1)]
)
def test_a_failure_is_an_exit_code(program, code):
    assert run(program).exit_code == code


def test_it_sees_no_files_but_its_own_and_python(tmp_path):
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    program = f"""
        import os
        for path in [{str(secret)!r}, {__file__!r}, "/proc/1/mem", "/etc/passwd", os.path.expanduser("~root/.ssh")]:
            print(os.path.exists(path))
        print(sorted(os.listdir(".")), os.environ.get("USER"))
    """
    assert run(program).output.decode() == "False\n" * 5 + "['main.py', 'stdin'] None\n"


def test_it_writes_nowhere_but_in_its_folder():
    program = """
        import json, os
        open("own.txt", "w").write("x")
        for folder in ["/", "/usr", "/dev", os.path.dirname(json.__file__)]:
            try:
                open(folder + "/x", "w")
            except OSError:
                print("refused")
    """
    assert run(program).output == b"refused\n" * 4


def test_it_reaches_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        execution = run(f"import socket\nsocket.create_connection({address!r}, timeout=5)")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert execution.exit_code == 1


def test_it_signals_no_process_outside():
    program = f"""
        import os, signal
        for pid in [1, os.getppid(), {os.getpid()}, -1]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        print("alive")
    """
    execution = run(program)
    assert (execution.output, execution.exit_code) == (b"alive\n", 0)


def test_a_fork_bomb_stays_small_and_ends():
    program = """
        import os
        forked = 0
        while True:
            try:
                if os.fork() == 0:
                    while True:
                        try:
                            os.fork()
                        except OSError:
                            os.execv("/bin/sleep", ["rlcore-bomb", "600"])
                forked += 1
            except OSError:
                break
        print(forked)
    """
    execution = run(program, max_processes=4)
    assert 1 <= int(execution.output) <= 3
    assert not named("rlcore-bomb")


def test_threads_are_counted_too():
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
    assert run(program, max_processes=3).output == b"2\n"


def test_it_leaves_no_process_behind():
    program = """
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv("/bin/sleep", ["rlcore-left", "600"])
            os._exit(0)
        print("done", flush=True)
        os.kill(os.getpid(), 9)
    """
    execution = run(program)
    assert (execution.output, execution.exit_code) == (b"done\n", -signal.SIGKILL)
    assert not named("rlcore-left")


def test_all_its_files_together_fit_the_limit():
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
    assert run(program).output == b"ENOSPC True\nENOSPC\n"


def test_it_cannot_take_all_memory():
    execution = run("try:\n    x = bytearray(2**28)\nexcept MemoryError:\n    print('refused')")
    assert execution.output == b"refused\n"


def test_a_limit_cannot_be_raised():
    program = """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)
            except (OSError, ValueError):
                print("refused")
    """
    assert run(program).output == b"refused\n" * 3


def test_a_loop_ends_by_its_processor_time():
    execution = run("while True: pass", cpu_time_s=1)
    assert execution.timed_out
    assert execution.exit_code == -signal.SIGXCPU


def test_a_loop_that_ignores_the_signal_ends_too():
    execution = run("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", cpu_time_s=1)
    assert execution.exit_code == -signal.SIGKILL


def test_what_waits_ends_by_the_clock():
    execution = run("import time\nprint('started', flush=True)\ntime.sleep(600)", wall_time_s=1.0)
    assert execution.timed_out
    assert execution.exit_code is None


def test_output_without_end_is_cut():
    execution = run("while True: print('x' * 1000)", max_output_kib=64)
    assert len(execution.output) == 64 * 1024
    assert execution.exit_code is None
    assert not execution.timed_out


def test_it_writes_no_report():
    program = """
        import os
        for fd in range(2, 32):
            try:
                os.write(fd, b'{"exit": 0}' + bytes([10]))
            except OSError:
                pass
        os._exit(7)
    """
    assert run(program).exit_code == 7


def test_a_call_that_is_cancelled_ends_the_program():
    program = "import os\nos.execv('/bin/sleep', ['rlcore-cancelled', '600'])"

    async def check():
        task = asyncio.create_task(Sandbox(CONFIG).run({"main.py": program}, wall_time_s=600))
        while not named("rlcore-cancelled"):
            assert not task.done(), task.result()
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not named("rlcore-cancelled")

    asyncio.run(check())


def named(word):
    """Processes of this machine with a word in their command line."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if word in line]
