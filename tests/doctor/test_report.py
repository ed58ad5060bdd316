"""The page as data: what fits, what does not, and nothing that is private."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.schema.file_limits import expanded
from rlcore_doctor.child import Outcome
from rlcore_doctor.plugins import Listing
from rlcore_doctor.report import report

GPU = {"name": "NVIDIA H100", "memory.total": "81559 MiB", "driver_version": "570.1", "compute_cap": "9.0"}


@pytest.fixture
def played(monkeypatch, site):
    """An environment without plugins, on a machine without GPUs."""
    monkeypatch.setattr("rlcore_doctor.report.listing", lambda _: Listing(content={"spi": [2, 0]}))
    monkeypatch.setattr("rlcore_doctor.report.environment_findings", lambda *_: iter(()))
    monkeypatch.setattr("rlcore_doctor.machine.gpus", list)
    return monkeypatch


def test_an_environment_in_which_all_fits(played, install) -> None:
    install("rlcore", "1.0", "numpy>=1.26")
    install("numpy", "2.3.5")
    for name in ("acme", "rlcore-acme", "rlcore-grpo"):
        install(name, "2.0", "rlcore", points="[rlcore.sinks]\nanvil = acme:SINK\n")
    page = report(None, 1.0, imports=False)
    assert (page["fits"], page["problems"], page["notes"]) == (True, [], [])
    assert [one["name"] for one in page["packages"]] == ["rlcore", "rlcore-grpo"]
    assert [one["name"] for one in page["others"]] == ["acme", "rlcore-acme"]
    assert page["libraries"] == [{"name": "numpy", "version": "2.3.5", "build": "", "import": {}}]
    assert page["not_installed"] == ["torch", "transformers", "megatron-core", "transformer-engine", "ray", "vllm"]


def test_what_does_not_fit_has_its_remedy(played, install) -> None:
    install("rlcore-fsdp2", "1.0", "torch>=2.11")
    page = report(None, 1.0, imports=False)
    assert page["fits"] is False
    assert page["problems"] == [
        {"found": "rlcore-fsdp2 1.0 requires torch>=2.11, which is not installed", "remedy": "pip install 'torch>=2.11'"}
    ]


def test_a_package_for_another_python_is_one_problem(played, install) -> None:
    install("numpy", "2.3.5", files=["numpy/x.cpython-399-x86_64-linux-gnu.so"])
    played.setattr("rlcore_doctor.libraries.run", lambda *_: Outcome(output='{"error": "ImportError: x"}', errors="", code=0))
    page = report(None, 1.0, imports=True)
    (problem,) = page["problems"]
    assert problem["found"].startswith("numpy 2.3.5 is for another Python or system")
    assert page["libraries"][0]["import"] == {"error": "ImportError: x"}


def test_a_library_that_fails_by_a_package_for_another_python_is_no_second_problem(played, install) -> None:
    install("transformers", "5.24.0", files=["transformers/__init__.py"])
    install("regex", "1.0", files=["regex/__init__.py", "regex/_regex.cpython-399-x86_64-linux-gnu.so"])
    result = {"error": "ImportError: _regex", "raised_in": ["regex", "transformers"]}
    played.setattr("rlcore_doctor.libraries.run", lambda *_: Outcome(output=json.dumps(result), errors="", code=0))
    (problem,) = report(None, 1.0, imports=True)["problems"]
    assert problem["found"].startswith("regex 1.0 is for another Python or system")


def test_a_torchvision_of_another_torch_is_one_problem(played, install) -> None:
    install("torch", "2.15.0", files=["torch/__init__.py"])
    install("torchvision", "0.26.0", "torch==2.11.0", files=["torchvision/__init__.py"])
    install("transformers", "5.24.0", files=["transformers/__init__.py"])

    def run(arguments: list[str], _: float) -> Outcome:
        failed = {
            "error": "RuntimeError: no such operator",
            "raised_in": ["torch", "torchvision", arguments[-1].partition(".")[0]],
        }
        return Outcome(output=json.dumps({"version": "2.15.0"} if arguments[-1] == "torch" else failed), errors="", code=0)

    played.setattr("rlcore_doctor.libraries.run", run)
    reason = "torchvision 0.26.0 needs torch==2.11.0; found torch 2.15.0: models cannot be imported. pip uninstall torchvision"
    row = {"role": "trainer", "distribution": "acme", "version": "1.0", "spi": [2, 0], "state": "not usable", "reason": reason}
    rows = [{**row, "name": name} for name in ("fsdp2", "megatron")]
    played.setattr("rlcore_doctor.report.listing", lambda _: Listing(content={"plugins": rows}))
    (problem,) = report(None, 1.0, imports=True)["problems"]
    assert problem == {
        "found": "torchvision 0.26.0 requires torch==2.11.0; found torch 2.15.0. "
        "trainer fsdp2, trainer megatron are not usable",
        "remedy": "pip uninstall torchvision, which text models do not need; or install the release for torch 2.15.0",
    }


@pytest.mark.parametrize(("is_visible", "note"), [(True, "torch is a build for CPUs"), (False, "CUDA_VISIBLE_DEVICES hides")])
def test_gpus_that_a_run_does_not_take_are_a_note(played, install, is_visible: bool, note: str) -> None:
    played.setattr("rlcore_doctor.machine.gpus", lambda: [GPU])
    played.setattr("rlcore_doctor.report.has_gpu", lambda: is_visible)
    build = "+cpu" if is_visible else "+cu130"
    result = {"version": "2.13.0", "seconds": 1.0, "cuda": "13.0", "devices": 0}
    played.setattr("rlcore_doctor.libraries.run", lambda *_: Outcome(output=json.dumps(result), errors="", code=0))
    install("torch", f"2.13.0{build}")
    page = report(None, 1.0, imports=not is_visible)
    assert page["fits"] is True
    assert note in page["notes"][0]


@pytest.mark.parametrize(
    ("value", "fits", "note"),
    [
        ("1", True, "found torch 2.16.0; RLCORE_UNTRIED_VERSIONS=1 runs it all the same"),
        ("true", False, "RLCORE_UNTRIED_VERSIONS is 'true', which has no effect; expected 0 or 1"),
        ("0", False, ""),
        ("", False, ""),
    ],
)
def test_versions_that_nothing_was_tried_with(played, install, value: str, fits: bool, note: str) -> None:
    played.setenv("RLCORE_UNTRIED_VERSIONS", value)
    install("rlcore-fsdp2", "1.0", "torch<2.16,>=2.11")
    install("torch", "2.16.0")
    page = report(None, 1.0, imports=False)
    assert page["fits"] is fits
    assert [one.endswith(note) for one in page["notes"]] == [True] * bool(note)


def test_a_search_that_does_not_end_is_a_problem(played, monkeypatch) -> None:
    monkeypatch.setenv("RLCORE_LOAD_TIMEOUT_S", "1")
    monkeypatch.setattr("rlcore_doctor.report.installed", lambda: time.sleep(60))
    page = report(None, 1.0, imports=False)
    assert "the search for installed packages took longer" in page["problems"][0]["found"]


def test_secrets_and_the_home_directory_are_left_out(played, install) -> None:
    home = str(expanded("~"))
    played.setenv("HF_TOKEN", "not-to-be-told-1234")
    played.setenv("RLCORE_CACHE", f"{home}/cache")
    played.setenv("RLCORE_OTHER", f"{home}ther/cache:/mnt{home}:{home}")
    played.setenv("HF_ENDPOINT", "https://me:my-password-1@hub.example")
    played.setenv("DATABASE_URL", "not a variable of these libraries")
    page = report(None, 1.0, imports=False)
    variables = page["variables"]
    assert (variables["HF_TOKEN"], variables["RLCORE_CACHE"]) == ("***", "~/cache")
    assert variables["RLCORE_OTHER"] == f"{home}ther/cache:/mnt{home}:~"
    assert "DATABASE_URL" not in variables
    text = json.dumps(page)
    assert not [one for one in ("not-to-be-told", "my-password", f'"{home}/') if one in text]


def test_it_runs_where_rlcore_itself_cannot_be_imported(tmp_path: Path) -> None:
    for name in ("numpy", "pyarrow", "cattrs", "pluggy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('built for another Python')\n")
    command = [sys.executable, "-m", "rlcore_doctor", "--no-import", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    page = json.loads(ended.stdout)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert [one["found"] for one in page["problems"] if "built for another Python" in one["found"]]
    assert {"rlcore", "rlcore-doctor"} <= {one["name"] for one in page["packages"]}
