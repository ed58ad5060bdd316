"""Descendants are found and killed in other sessions too, and after their parents have ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlcore_workers.descendants import adopt_orphans, descendants, end_descendants, supervised

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
sys.stdin.read()
"""
"""Leaves a process of a session of its own behind, tells its number, and waits."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system tells of no processes in /proc")


@pytest.fixture
def adopting() -> Iterator[tuple[int, int]]:
    """A process that is the parent of all orphans below it, and one of these."""
    ours, theirs = os.pipe()
    if (process := os.fork()) == 0:
        adopt_orphans()
        child = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=theirs)
        child.wait()
        os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as told:
        yield process, int(told.readline())
    os.waitpid(process, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_what_has_a_session_of_its_own_is_found_and_ended(adopting: tuple[int, int]) -> None:
    process, daemon = adopting
    assert os.getsid(daemon) not in (os.getsid(0), os.getsid(process))
    assert {process, daemon} <= descendants(os.getpid())
    assert daemon in descendants(process)
    end_descendants(process)
    assert descendants(process) == set()


THREAD_ALONE = """
import ctypes, subprocess, threading
def go_on():
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, flush=True)
    child.wait()
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Ends its main thread; another one has a child, tells its number, and waits for it."""


@pytest.fixture
def headless() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process whose main thread has ended, and its child."""
    process = subprocess.Popen([sys.executable, "-c", THREAD_ALONE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    while Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    yield process, child
    for number in (process.pid, child):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="a main thread that ends ends the process elsewhere")
def test_a_process_whose_main_thread_has_ended_lives_in_its_others(headless: tuple[subprocess.Popen[str], int]) -> None:
    process, child = headless
    assert process.poll() is None
    assert {process.pid, child} <= descendants(os.getpid())
    assert descendants(process.pid) == {child}
    end_descendants(process.pid)
    assert descendants(process.pid) == set()
    assert process.wait() == 0, "all of its threads have ended"
    assert process.pid not in descendants(os.getpid())


def test_nobody_descends_from_a_process_that_is_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert descendants(gone.pid) == set()
    end_descendants(gone.pid)


SLEEPING = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(1000)"
LEAVING = f"""
import os, subprocess, sys
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
    subprocess.Popen([sys.executable, "-c", {SLEEPING!r}, *sys.argv[1:]], start_new_session=True)
os.execv(sys.executable, [sys.executable, "-c", {SLEEPING!r}, *sys.argv[1:]])
"""
"""Leaves processes in sessions of their own, and daemons of these, and sleeps."""
KINDS = {
    "an agent": """
import asyncio
from rlcore_serve.agents.process import run_process
asyncio.run(run_process([sys.executable, "-c", LEAVING, marked], {}, ""))
""",
    "a reward in a worker pool": """
import asyncio
from rlcore_workers.pool import WorkerPool
from rlcore_workers.process import Task
asyncio.run(WorkerPool(Task(name="rewards", handle="tests_left:call"), 1).call([sys.executable, "-c", LEAVING, marked]))
""",
    "a supervised program": """
import subprocess
from rlcore_workers.descendants import supervised
subprocess.run(supervised([sys.executable, "-c", LEAVING, marked]))
""",
}
"""Scripts that start processes in each way that a run does."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_killed_run_has_started_ends(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tests_left.py").write_text("import subprocess\ndef call(argument, request): return subprocess.call(request)\n")
    mark = tmp_path / "started"
    script = f"import sys\nLEAVING, marked = {LEAVING!r}, {str(mark)!r}\n{KINDS[kind]}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as process:
        while (not mark.exists() or mark.stat().st_size < 4) and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None
        process.kill()
    deadline = time.monotonic() + 300
    while living(str(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert living(str(mark)) == []


BESIDE = "import sys, time; print('up', flush=True); time.sleep(1000)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_supervisor_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    with subprocess.Popen(supervised([sys.executable, "-c", LEAVING, str(mark)])) as process:
        while (not mark.exists() or mark.stat().st_size < 4) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
    assert process.returncode == -signal.SIGKILL
    assert living(str(mark)) == []


ATTACKS = {
    "stops": "os.kill(os.getppid(), signal.SIGSTOP)",
    "kills": "os.kill(os.getppid(), signal.SIGKILL)",
    "kills its group": "os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)",
    "kills both": "both = [os.getppid(), int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])]\n"
    "if os.fork() == 0:\n    if os.fork(): os._exit(0)\n    [os.kill(one, signal.SIGKILL) for one in both]",
    "signals": "[os.kill(os.getppid(), number) for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM)]",
    "starts anew all the time": "while os.fork() == 0: time.sleep(0.001)\nos._exit(0)",
    "starts anew at once": "while os.fork() == 0: pass\nos._exit(0)",
    "starts anew in new groups": "while os.fork() == 0: os.setsid()\nos._exit(0)",
}
"""Programs that end or evade their supervisor."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_that_attacks_its_supervisor_ends_with_the_run(attack: str, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    evading = f"import os, signal, sys, time\n{ATTACKS[attack]}\n{SLEEPING}"
    attacking = f"import os, sys\nif os.fork() == 0:\n    os.setsid()\n    exec({SLEEPING!r})\nexec({evading!r})"
    command = f"[sys.executable, '-c', {attacking!r}, {str(mark)!r}]"
    running = f"asyncio.run(run_process({command}, {{}}, ''))"
    script = f"import asyncio, sys\nfrom rlcore_serve.agents.process import run_process\n{running}"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        while not mark.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.1)
        process.kill()
    deadline = time.monotonic() + 300
    while living(str(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert living(str(mark)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_a_program_has_the_usual_signals() -> None:
    command = ["grep", "SigIgn", "/proc/self/status"]
    bare, held = (subprocess.run(one, capture_output=True, check=True) for one in (command, supervised(command)))
    assert held.stdout == bare.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_a_group_that_it_does_not_lead_outlives_its_parent() -> None:
    script = """
import os, subprocess, sys
from rlcore_workers.descendants import end_with
if os.fork() == 0:
    end_with(os.getppid())
    print("up", flush=True)
    import time
    time.sleep(1000)
sys.stdin.read()
"""
    with (
        subprocess.Popen([sys.executable, "-c", BESIDE], stdout=subprocess.PIPE, process_group=0) as leader,
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=leader.pid
        ) as parent,
    ):
        assert leader.stdout is not None
        assert parent.stdout is not None
        leader.stdout.readline()
        parent.stdout.readline()
        parent.kill()
        assert parent.stdout.read() == b"", "its child has ended"
        assert leader.poll() is None
        leader.kill()


def test_a_supervisor_adds_nothing_to_what_its_program_prints() -> None:
    ended = subprocess.run([sys.executable, "-W", "always", *supervised(["echo", "own"])[1:]], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"own\n", b"")


def living(word: str) -> list[bytes]:
    """Command lines with a word in them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if word.encode() in (line := file.read_bytes()):
                found.append(line)
    return found
