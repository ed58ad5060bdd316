"""Runs a test in a process of its own in which one line of one module is another.

A server imports what is heavy and never changed, and forks for every fault. The child puts the fault into the module's source
as it is imported, so the file stays as it is, and whatever imports the module in that process gets the fault.
"""

import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

ROOT = Path(__file__).parents[2]
HEAVY = (
    "numpy",
    "pyarrow.parquet",
    "pytest",
    "hypothesis",
    "pandas",
    "plotext",
    "cattrs",
    "click.testing",
    "rich",
    "tokenizers",
    "safetensors.torch",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.core_model_loading",
    "ray",
)
"""Imported once for all faults; nothing of rlcore may be among them."""
LEFT_OUT = ("cacheprovider", "xdist", "unraisableexception")
"""pytest's plugins that no test is judged by. The last one looks for garbage at its end, through all that the server imported:
longer than most tests take."""
PROFILE = "planted"
"""Hypothesis's, which the child registers."""
SURVIVED, KILLED = 0, 1
"""pytest's exit codes where all tests passed, and where some failed."""
NEVER_LOADED = 90
LIMIT_S = 600
"""Of a test; half of what the one has that judges it."""


@frozen
class Outcome:
    """What became of a fault."""

    verdict: Literal["killed", "survived", "broken"]
    """ "broken" where the test could not be judged: there is none of that name, or it never imports the module."""
    output: str
    """pytest's."""


def source_with(module: str, line: str, planted: str) -> str:
    """The module's source with the fault. ValueError where the line is not there exactly once."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    if text.count(line) != 1:
        raise ValueError(f"{module} has {text.count(line)} times the line {line!r}; expected it once")
    return text.replace(line, planted)


class Server:
    """Judges faults, one at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def judge(self, module: str, line: str, planted: str, killer: str, folder: Path) -> Outcome:
        """Run the test `killer` with the fault; its output goes through a file in `folder`."""
        order = {"module": module, "source": source_with(module, line, planted), "killer": killer, "folder": str(folder)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server has ended, with {self._process.wait()}"
        code = int(answer)
        output = (folder / "output").read_text(errors="replace")
        verdicts: dict[int, Literal["killed", "survived"]] = {SURVIVED: "survived", KILLED: "killed"}
        return Outcome(verdicts.get(code, "broken"), output)

    def close(self) -> None:
        """End the process, and a test that hangs in it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def serving() -> Iterator[Server]:
    """A server, ended afterwards."""
    server = Server()
    try:
        yield server
    finally:
        server.close()


class Planted(MetaPathFinder):
    """Finds one module, and gives it other source."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source
        self._is_looking = False
        self.loaders: list[PlantedLoader] = []

    @property
    def is_loaded(self) -> bool:
        """Whether the module was imported, and not only looked for."""
        return any(loader.is_loaded for loader in self.loaders)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, but that its source is the planted one."""
        if fullname != self._module or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        assert spec is not None
        assert spec.origin is not None
        spec.loader = PlantedLoader(fullname, spec.origin, self._source)
        self.loaders.append(spec.loader)
        return spec


class PlantedLoader(SourceFileLoader):
    """Compiles other source than its file's."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source
        self.is_loaded = False

    def get_code(self, fullname: str) -> Any:
        """The planted source's."""
        self.is_loaded = True
        return compile(self._source, self.path, "exec")


def _serve() -> None:
    for name in HEAVY:
        importlib.import_module(name)
    assert not any(name.partition(".")[0].startswith("rlcore") for name in sys.modules)
    gc.freeze()  # what is collected at the end of each test is not among these imports
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(order)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(order: dict[str, str]) -> None:
    """In the child: run the test, and leave."""
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    # What fails is enough: no smaller example is looked for, and none is kept for tests of the file as it is.
    phases, patient = (Phase.explicit, Phase.generate), [HealthCheck.too_slow]
    settings.register_profile(PROFILE, deadline=None, suppress_health_check=patient, phases=phases, database=None)
    folder = Path(order["folder"])
    descriptor = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    planted = Planted(order["module"], order["source"])
    sys.meta_path.insert(0, planted)
    options = ["-x", "-q", f"--timeout={LIMIT_S}", f"--basetemp={folder / 'base'}", f"--hypothesis-profile={PROFILE}"]
    code = pytest.main([*options, *(f"-pno:{plugin}" for plugin in LEFT_OUT), order["killer"]])
    sys.stdout.flush()
    os._exit(int(code) if planted.is_loaded else NEVER_LOADED)


if __name__ == "__main__":
    _serve()
