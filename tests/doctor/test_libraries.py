"""Imports of libraries, whatever these do."""

import types
import warnings

import pytest

from rlcore_doctor.child import run
from rlcore_doctor.libraries import Library, device_findings, import_findings, libraries
from rlcore_doctor.probe import probe

SOURCES = {
    "fine": ("__version__ = '1.5'\nprint('loud')\n", {"version": "1.5"}, ""),
    "fails": (
        "raise RuntimeError('operator torchvision::nms does not exist')\n",
        {},
        "RuntimeError: operator torchvision::nms",
    ),
    "caused": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ImportError('numpy') from error\n",
        {},
        "ImportError: numpy; caused by ZeroDivisionError: division by zero",
    ),
    "ends": ("import sys\nsys.exit(3)\n", {}, "SystemExit: 3"),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", {}, 'modules/ray.py", line 2'),
    "hangs": ("import time\ntime.sleep(600)\n", {}, "was not imported after 1 s"),
    "leaves threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n",
        {"version": ""},
        "",
    ),
}


@pytest.fixture
def libraries_of(install, found, tmp_path, monkeypatch):
    """Return a function that installs a library, and tells how its import ended."""

    def ended(source: str, seconds: float) -> list[Library]:
        install("ray", "2.60.0")
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "ray.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
        return libraries(found(), seconds)

    return ended


@pytest.mark.parametrize("kind", SOURCES)
def test_how_an_import_ends(kind: str, libraries_of) -> None:
    source, expected, fault = SOURCES[kind]
    seconds = 1 if kind == "hangs" else 60
    (library,) = libraries_of(source, seconds)
    assert expected.items() <= library.result.items()
    findings = list(import_findings([library], seconds))
    assert [fault in one.found and one.found.startswith("ray 2.60.0") for one in findings] == [True] * bool(fault)
    assert all(one.remedy for one in findings)


def test_a_library_that_fails_by_another_is_no_second_finding(install, found) -> None:
    for name in ("torchvision", "transformers"):
        install(name, "1.0")
    results = {"torchvision": ["torch", "torchvision"], "transformers": ["torch", "torchvision", "transformers"]}
    failed = [
        Library(package=package, result={"error": "RuntimeError: x", "raised_in": results[name]})
        for name, package in found().items()
    ]
    (finding,) = import_findings(failed, 1.0)
    assert finding.found == "torchvision 1.0 cannot be imported: RuntimeError: x"


def test_nothing_is_imported_where_none_is_asked_for(install, found, monkeypatch) -> None:
    monkeypatch.setattr("rlcore_doctor.libraries.run", None)
    install("torch", "2.13.0")
    assert [library.result for library in libraries(found(), None)] == [{}]


def test_a_module_that_is_not_there() -> None:
    assert probe("rlcore_none")["error"].startswith("ModuleNotFoundError")
    assert "rlcore_none" in probe("rlcore_none")["raised_in"]
    assert run(["-m", "rlcore_doctor.probe", "rlcore_none"], 60).output.startswith('{"error"')


@pytest.mark.parametrize(("available", "has_gpus", "expected"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_gpus_that_torch_does_not_see(monkeypatch, install, found, available: bool, has_gpus: bool, expected: int) -> None:
    def is_available() -> bool:
        warnings.warn("the driver is too old", stacklevel=1)
        return available

    cuda = types.SimpleNamespace(is_available=is_available, device_count=lambda: 1)
    torch = types.SimpleNamespace(__version__="2.13.0+cu130", cuda=cuda, version=types.SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    result = probe("torch")
    assert (result["cuda"], result["devices"], result["warning"]) == ("13.0", int(available), "the driver is too old")
    install("torch", "2.13.0")
    findings = list(device_findings([Library(package=found()["torch"], result=result)], has_gpus))
    assert len(findings) == expected
    assert all("the driver is too old" in one.found and "CUDA 13.0" in one.found for one in findings)
