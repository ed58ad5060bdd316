"""A run with one fault after another, resumed until it is done: how it came through each, and what it leaves behind."""

import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import psutil
from attrs import define, evolve, field, frozen

from .chaos_faults import CLOCK, FAULTS, Struck, Target
from .run_processes import GONE_S, last_step, marked, started

START_S = 30.0
"""Faults that do not wait for a step come within as many seconds."""
PROGRESS_S = 300.0
"""Most seconds to wait for a step, or for the end."""
FLUSH_S = 1.0
"""Until the last words of a process that has ended are in its output."""
STEPS_PER_FAULT = 8
BY_KILLED = ("ray", "vllm_dist_*", "tmp*wandb-*")
"""What Ray keeps, and what vLLM, and wandb which it imports, only remove as their process ends by itself."""
NAMED = frozenset({6, 11, 12})
"""Exit codes of errors that say what is wrong with a checkpoint, the disk or a process."""
RAYS_OWN = re.compile(
    "Failed to get the system config from raylet because it is dead|Failed to connect to GCS within|Ray's core ended it"
)
"""Ray's core ends the driver by itself, with exit code 1, where the raylet dies, or the store as the driver joins; who says so
is Ray, or the process that rlcore has for it."""
LAST_WORDS = 1000
"""Characters of its output."""
DAMAGING = ("changed byte", "truncated file")
"""Faults of a checkpoint: where it is the only one, the run cannot be resumed."""
LOST = "no intact checkpoint"


@frozen(kw_only=True)
class Outcome:
    """What came of a fault."""

    kind: str
    what: str
    outcome: str
    message: str = ""


@define(kw_only=True)
class ChaosRun:
    """`rlcore train` in a process of its own. What must not be is collected in `problems`."""

    folder: Path
    """Where it is started."""
    temporary: Path
    """Where its processes put what is temporary; a short path, since Ray's sockets are below it."""
    arguments: Sequence[str]
    directory: Path
    """The run's."""
    seed: int
    mark: str = field(factory=lambda: uuid.uuid4().hex)
    secret: str = field(factory=lambda: uuid.uuid4().hex)
    outcomes: list[Outcome] = field(factory=list)
    problems: list[str] = field(factory=list)
    num_steps: int = 0
    _num_before: int = 0
    """Outcomes of runs before this one."""

    def run(self, num_faults: int, kinds: Sequence[str]) -> None:
        """So many faults, then let it come to its end. A run that has no intact checkpoint has stopped with the cause named,
        and another one begins for the faults that are left."""
        draws = random.Random(self.seed)
        code: int | None = None
        while code != 0 or len(self.outcomes) < num_faults:
            self.num_steps += STEPS_PER_FAULT if code in (None, 0) else 0
            num_outcomes, num_said = len(self.outcomes), len(self._output())
            with started(self.folder, self._command(), self.mark, self._variables()) as process:
                while process.poll() is None and len(self.outcomes) < num_faults:
                    self._await_moment(process, draws)
                    self._fault(process, draws, kinds)
                code = self._await_end(process)
            self._check_end()
            if code in NAMED and LOST in self._output()[num_said:]:
                del self.outcomes[num_outcomes:]  # it would have ended without them too
                self._end_lost()
                code = None
            if len(self.problems) > num_faults:
                return
        self._check_files()

    def _end_lost(self) -> None:
        """The run is over, by the last fault of a checkpoint."""
        num_checkpoints = len(list(self.directory.glob("checkpoints/step-*")))
        damaging = [number for number, one in enumerate(self.outcomes) if one.kind in DAMAGING and number >= self._num_before]
        if damaging:
            self.outcomes[damaging[-1]] = evolve(self.outcomes[damaging[-1]], outcome="stopped with the cause named")
        if num_checkpoints > len(damaging):
            self.problems.append(f"{LOST} of {num_checkpoints}, of which at most {len(damaging)} were damaged")
        print(f"{LOST}: another run begins", flush=True)
        self._check_secrets()
        shutil.rmtree(self.directory)
        self.num_steps, self._num_before = 0, len(self.outcomes)

    def _command(self) -> list[str]:
        resume = ["--resume"] if self.directory.exists() else []
        return [*self.arguments, f"run.num_steps={self.num_steps}", *resume]

    def _variables(self) -> dict[str, str]:
        return {
            "TMPDIR": str(self.temporary),
            "RAY_TMPDIR": str(self.temporary),
            "PYTHONPATH": str(self.folder / "site"),
            CLOCK: str(self.folder / "clock"),
            # Where files are limited, Python keeps what it could write of a module's bytecode, which ends every later process.
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_TOKEN": self.secret,
            "WANDB_API_KEY": self.secret,
        }

    def _await_moment(self, process: subprocess.Popen[bytes], draws: random.Random) -> None:
        """Wait for a step or two and a little longer, or for a while that may end before them."""
        is_early, num_left, offset = draws.random() < 0.2, draws.choice([1, 2]), draws.uniform(0, 0.4)
        early_s = draws.uniform(0, START_S)
        self._await_steps(process, num_left, early_s if is_early else PROGRESS_S)
        time.sleep(offset)

    def _await_steps(self, process: subprocess.Popen[bytes], num_steps: int, limit_s: float) -> bool:
        """Whether so many came, or the run's end, within a time."""
        end, before = time.monotonic() + limit_s, last_step(self.directory)
        while num_steps and process.poll() is None:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
            step = last_step(self.directory)
            num_steps -= step > before
            before = step
        return True

    def _fault(self, process: subprocess.Popen[bytes], draws: random.Random, kinds: Sequence[str]) -> None:
        if process.poll() is not None:
            return
        self._check_ports()
        target = Target(driver=process.pid, mark=self.mark, directory=self.directory, clock=self.folder / "clock")
        kind, before = draws.choice(sorted(kinds)), len(self._output())
        try:
            struck = FAULTS[kind](target, draws)
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            return  # what it was drawn for has just gone
        if struck is not None:
            began = time.monotonic()
            self._hold(process, struck)
            outcome = self._outcome(process, kind, struck, before)
            self.outcomes.append(outcome)
            print(
                f"{len(self.outcomes)}: {kind} ({struck.what}), behind step {last_step(self.directory)}: {outcome.outcome}, "
                f"{time.monotonic() - began:.0f} s  {outcome.message}",
                flush=True,
            )

    def _hold(self, process: subprocess.Popen[bytes], struck: Struck) -> None:
        try:
            if struck.hold_s:
                process.wait(struck.hold_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            struck.mend()

    def _outcome(self, process: subprocess.Popen[bytes], kind: str, struck: Struck, before: int) -> Outcome:
        """Wait until it can be told how the run came through."""
        in_time = self._await_steps(process, 2, PROGRESS_S)
        time.sleep(FLUSH_S)
        said = self._output()[before:]
        code = process.poll()
        message = ""
        if not in_time:
            outcome = "hung"
            self.problems.append(f"{kind} ({struck.what}): no step within {PROGRESS_S:g} s: {said[-2000:]}")
            process.kill()
        elif code == -signal.SIGKILL:
            outcome = "killed, resumed"
        elif code:
            outcome, message = "stopped with the cause, resumed", self._error(code, kind, struck, said)
        elif "from the newest checkpoint" in said:
            outcome = "its workers started anew"
        elif "the engine of rank" in said:
            outcome = "other engines went on"
        else:
            outcome = "asked again" if "is tried again" in said else "went on"
        return Outcome(kind=kind, what=struck.what, outcome=outcome, message=message)

    def _error(self, code: int, kind: str, struck: Struck, said: str) -> str:
        """The first line of its one error."""
        if code == 1 and (own := RAYS_OWN.search(said)):
            return own.group()
        found = re.findall(r"^error: (.*)$", said, re.MULTILINE)
        # What a rank wrote last is quoted, indented, and may have tracebacks.
        if code not in NAMED or len(found) != 1 or re.search("^Traceback", said, re.MULTILINE):
            self.problems.append(f"{kind} ({struck.what}): exit code {code}, and no cause: {said[-3000:]}")
        return found[0][:200] if found else ""

    def _output(self) -> str:
        file = self.folder / "output"
        return file.read_text(errors="replace") if file.exists() else ""

    def _await_end(self, process: subprocess.Popen[bytes]) -> int:
        before = len(self._output())
        while not process.poll() and self._await_steps(process, 1, PROGRESS_S) and process.poll() is None:
            pass
        if process.poll() is None:
            self.problems.append(f"no step within {PROGRESS_S:g} s: {self._output()[before:][-2000:]}")
            process.kill()
        code = process.wait()
        is_rays = code == 1 and RAYS_OWN.search(self._output()[-LAST_WORDS:])
        if code not in (0, -signal.SIGKILL) and code not in NAMED and not is_rays:
            self.problems.append(f"exit code {code}: {self._output()[-3000:]}")
        return code

    def _check_ports(self) -> None:
        """Nothing listens for other machines."""
        own = {process.pid for process in marked(self.mark)}
        for each in psutil.net_connections(kind="inet"):
            if each.pid in own and each.status == psutil.CONN_LISTEN:
                address = ip_address(each.laddr.ip.removeprefix("::ffff:"))
                if not address.is_loopback:
                    self.problems.append(f"process {each.pid} listens on {each.laddr}")

    def _check_end(self) -> None:
        """No process outlives the driver."""
        end = time.monotonic() + GONE_S
        while left := marked(self.mark):
            if time.monotonic() > end:
                self.problems.append(f"still there: {[process.cmdline() for process in left]}")
                for process in left:
                    process.kill()
            time.sleep(0.1)

    def _check_files(self) -> None:
        """Nothing half-written, nothing temporary but Ray's logs, and no secret in what was written."""
        left = list(self.directory.rglob("*.partial"))
        left += [path for path in self.temporary.iterdir() if not any(map(path.match, BY_KILLED))]
        if left:
            self.problems.append(f"left behind: {', '.join(map(str, left))}")
        self._check_secrets()

    def _check_secrets(self) -> None:
        written = [self.folder / "output", *self.directory.rglob("*"), *self.temporary.rglob("*")]
        for path in written:
            if path.is_file() and self.secret.encode() in path.read_bytes():
                self.problems.append(f"a secret of the environment is in {path}")
