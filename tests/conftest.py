"""What tests take for granted of the process that runs them."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

from installer import installer  # noqa: F401 - a fixture of all tests
from runner import Runner

# How long an example takes is the machine's business: a busy one would fail what is right.
# Without explanations: in Python 3.11 these trace the process.
phases = [phase for phase in Phase if phase is not Phase.explain]
settings.register_profile("rlcore", deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=phases)
settings.load_profile("rlcore")
# TransformerEngine's products of float32 round to TF32 otherwise. Read when CUDA's libraries are loaded, here or in workers.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# A shell without job control, or nohup, has what it starts ignore these signals, and everything that this starts too.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)

LONGEST = (
    "mutants",
    "system",
    "oracle",
    "vllm_generation",
    "conformance",
    "ray_execution",
    "fsdp2_backend",
    "megatron_backend",
    "strangers",
    "serving",
    "tinker",
    "session",
    "docs",
    "code_environment",
)
"""Folders whose files take up to minutes each, the one first whose one file takes a quarter of an hour."""

OWN_PROCESS = "RLCORE_TEST_IN_ITS_OWN_PROCESS"
"""Variable of the environment of a process that runs one test marked `own_process`."""

INVARIANT_MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 640,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without looking for garbage: what tests import leaves hardly any, and is looked through again and again as it grows."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test` and `make test-core`."""
    parser.addoption("--narrow", action="store_true", help="leave out the cases that are marked as wide (tests/tiers.py)")
    parser.addoption("--note-passed", help="write the tests that passed into this file")
    parser.addoption("--without", help="leave out the tests in a file that --note-passed wrote")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the processes of tests and note what passes, in the one process that all reports reach."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Runner(config))
    if (file := config.getoption("--note-passed", None)) is not None:
        config.pluginmanager.register(PassedTests(Path(file)))


class PassedTests:
    """Writes the names of tests that pass, one a line."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the test's name. A test that is skipped has to run elsewhere, and has none here."""
        if report.when == "call" and report.passed:
            self._file.write(f"{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        """Close the file."""
        self._file.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files first: one that starts last would keep a single process busy at the end. Leave out wide cases, and
    what passed elsewhere."""
    if config.getoption("--narrow"):
        # Here, since what runs in its own process with --import-mode=prepend gets this file as a module of no package.
        from .mutants.faults import FAULTS
        from .tiers import wide_items

        wide = wide_items(items, {fault.killer for fault in FAULTS})
        config.hook.pytest_deselected(items=list(wide))
        items[:] = [item for item in items if item not in wide]
    if (file := config.getoption("--without")) is not None:
        passed = set(Path(file).read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    folders = [Path(__file__).parent / folder for folder in LONGEST]

    @cache
    def place(file: Path) -> int:
        return next((number for number, folder in enumerate(folders) if file.is_relative_to(folder)), len(folders))

    items.sort(key=lambda item: place(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `own_process` by a pytest of its own."""
    if pyfuncitem.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", pyfuncitem.nodeid]
    options: Any = {"cwd": pyfuncitem.config.rootpath, "env": {**os.environ, OWN_PROCESS: "1", "PYTEST_ADDOPTS": ""}}
    for timeout_s in (
        200,
        300,
    ):  # Python 3.11 checks for signals in a traced function's first line, for ever where it missed one
        with suppress(subprocess.TimeoutExpired):
            ran = subprocess.run(command, **options, capture_output=True, text=True, check=False, timeout=timeout_s)
            break
    else:
        pytest.fail("its own process did not end, twice")
    assert (ran.returncode, "1 passed" in ran.stdout) == (0, True), ran.stdout[-5000:] + ran.stderr[-2000:]
    return True


@pytest.fixture
def count_calls() -> Callable[[Callable[[], object]], int]:
    """A function that calls another and returns how many calls of Python and C functions that made, here and in threads that it
    started: a measure of work that no busy machine changes."""

    def count(function: Callable[[], object]) -> int:
        number = 0

        def add(_frame: object, event: str, _argument: object) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        gc.disable()  # which would call what others left behind
        threading.setprofile(add)
        sys.setprofile(add)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            gc.enable()
        return number

    return count


@pytest.fixture
def invariant_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the checks of batch-invariant kernels are told, on a Hopper with vLLM: a Qwen3 of heads and a vocabulary that these
    are for."""
    from packaging.version import Version

    from rlcore.spi import CheckContext, ModelSpec
    from rlcore_torchkit.huggingface import batch_invariance

    monkeypatch.setattr(batch_invariance, "compute_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: Version("0.26.0"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(INVARIANT_MODEL))
    model = ModelSpec(path=str(directory), dtype="bfloat16")
    return CheckContext(model=model, device="cuda", world_size=1, max_sequence_length=64, channel="cuda_ipc")


@pytest.fixture(scope="session", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Closing a trainer or an engine collects garbage; what has been loaded by now need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
