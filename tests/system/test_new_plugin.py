"""What `rlcore new-plugin` writes, of each role, in a fresh virtual environment: it installs, is listed, passes its tests and
trains the demo, unedited."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_conformance.cli.new_plugin import DEPENDENCIES as ROLES

ROOT = Path(__file__).parents[2]
WARM_START = (
    "run.num_steps=30",
    "schedule.warmup_steps=5",
    "training.prompts_per_step=64",
    "environment.arithmetic.num_evaluation=16",
    "generator.name=new_generator",
)
GRPO = (
    "generator.name=new_generator",
    "algorithm.name=new_algorithm",
    "environment.name=new_environment",
    'sinks.names=["new_sink"]',
    "cluster.execution=new_execution",
    "run.num_steps=2",
)


def finished(*command, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a package of each role, `new_trainer` and so on."""
    folder = tmp_path_factory.mktemp("new-plugins")
    for role in ROLES:
        arguments = ["new-plugin", role, f"new_{role}", "--directory", str(folder / f"rlcore-new-{role}")]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def python(workplace):
    """The interpreter of an environment of its own, in which they are installed beside what is there already."""
    finished(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=workplace)
    python = workplace / "venv" / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages())
    Path(finished(python, "-c", purelib, cwd=workplace).strip(), "shared.pth").write_text(shared)
    packages = [str(workplace / f"rlcore-new-{role}") for role in ROLES]
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    finished(sys.executable, "-m", "pip", "--python", python, "install", *offline, *packages, cwd=workplace)
    return python


def test_packages_install_and_are_usable(python, workplace):
    listing = json.loads(finished(python, "-m", "rlcore", "plugins", "--json", cwd=workplace))
    found = {row["name"]: row for row in listing["plugins"] if row["name"].startswith("new_")}
    assert {row["role"]: name for name, row in found.items()} == {role: f"new_{role}" for role in ROLES}
    assert all(row["usable"] for row in found.values()), found
    assert {row["distribution"] for row in found.values()} == {f"rlcore-new-{role}" for role in ROLES}


@pytest.mark.wide  # these are the kit's checks, which tests/conformance runs on plugins of every role
def test_packages_pass_their_own_tests(python, workplace):
    report = workplace / "report.json"
    tests = [str(workplace / f"rlcore-new-{role}" / "tests") for role in ROLES]
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={workplace}", f"--junitxml={report}"]
    finished(python, "-m", "pytest", *options, *tests, cwd=workplace)
    text = report.read_text()
    assert all(f"TestNew{role.capitalize()}" in text for role in ROLES)


@pytest.mark.wide  # tests/docs/test_plugin_examples.py trains with a package of the page's
def test_they_train_the_demo(python, workplace):
    """Both of its runs, made short; the first step of GRPO finds right answers to learn from."""
    short = [argument for override in WARM_START for argument in ("--warm-start", override)]
    demo = [str(ROOT / "demo" / "run.py"), "--directory", "runs", "--trainer", "new_trainer", *short]
    finished(python, *demo, *GRPO, cwd=workplace)
    run = workplace / "runs" / "demo-seed0" / "grpo"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = records[-1]
    assert last["step"] == 2
    assert last["reward_mean"] > 0
    assert last["grad_norm"] > 0
    assert json.loads((run / "summary.json").read_text())
    assert (run / "new_sink.txt").read_text().startswith("step ")
