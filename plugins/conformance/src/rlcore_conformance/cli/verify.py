"""The conformance kit on an installed plugin, in a process of its own: `python -m rlcore_conformance.cli.verify JOB`.

JOB is JSON with the role, the name, the distribution and its version, the options of the plugin's section, the device, and for
environments without rows of their own a row. Standard output gets one line of JSON for each check that has ended; what is
printed besides goes to standard error. The last line says that all have.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from inspect import getdoc
from typing import Any, TextIO

import pytest

import rlcore_conformance
from rlcore.registry.selection import ChosenPlugin, load_chosen
from rlcore.schema.structure import structure
from rlcore.spi.provider import Provider

OPTIONS = ("-q", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib")


def conformance_class(job: Mapping[str, Any]) -> type:
    """The kit's class for the plugin of a job."""
    chosen = ChosenPlugin(**{key: job[key] for key in ("role", "name", "distribution", "version")})
    provider = load_chosen(chosen).provider
    assert isinstance(provider, Provider)
    config, problems = structure(job["options"], provider.config, f"{job['role']}.{job['name']}")
    assert not problems, problems
    given = {"provider": provider, "config": config}
    if job["role"] in ("trainer", "generator"):
        given["device"] = job["device"]
    if job["row"] is not None:
        given["row"] = job["row"]
    fixtures = {name: pytest.fixture(lambda self, value=value: value) for name, value in given.items()}  # noqa: ARG005
    return type("TestPlugin", (getattr(rlcore_conformance, f"{job['role'].capitalize()}Conformance"),), fixtures)


class Reporter:
    """A plugin of pytest's that collects the job's class, and writes a line for each check."""

    def __init__(self, job: Mapping[str, Any], stream: TextIO) -> None:
        self._class, self._stream = conformance_class(job), stream

    def pytest_pycollect_makemodule(self, module_path: Any, parent: pytest.Collector) -> pytest.Module:
        """The one module holds the class."""
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path)
        module.obj.TestPlugin = self._class
        return module

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Write what is known once a check has ended."""
        outcome = yield
        report = outcome.get_result()
        seconds = item.stash.setdefault(_SECONDS, 0.0) + report.duration
        item.stash[_SECONDS] = seconds
        told = item.stash.setdefault(_OUTCOME, ("passed", ""))
        if report.outcome != "passed":
            told = item.stash[_OUTCOME] = (report.outcome, reason_of(report))
        if report.when == "teardown":
            function: Any = item
            line = {
                "check": function.originalname,
                "says": (getdoc(function.function) or "").partition("\n\n")[0].replace("\n", " "),
                "case": item.name,
                "outcome": told[0],
                "reason": told[1],
                "seconds": seconds,
            }
            print(json.dumps(line), file=self._stream, flush=True)


_SECONDS: pytest.StashKey[float] = pytest.StashKey()
_OUTCOME: pytest.StashKey[tuple[str, str]] = pytest.StashKey()


def reason_of(report: pytest.TestReport) -> str:
    """Why a check was skipped, or what failed in it."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else str(crash.message)


def main() -> int:
    """Run the kit; pytest's exit code."""
    job = json.loads(sys.argv[1])
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        module = os.path.join(folder, "test_plugin.py")
        with open(module, "w", encoding="utf-8"):
            pass
        os.chdir(folder)
        # Pytest looks into every folder between an argument and this one, the shared folder for temporary files too.
        places = (f"--rootdir={folder}", f"--confcutdir={folder}")
        code = int(pytest.main([*OPTIONS, *places, module], plugins=[Reporter(job, stream)]))
        print(json.dumps({"done": code}), file=stream, flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main())
