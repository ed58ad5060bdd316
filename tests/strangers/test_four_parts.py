"""A package of somebody else's, built as a wheel and installed into a folder of its own, trains without a change of rlcore."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model

PACKAGE = Path(__file__).parent / "four_parts"
WATCHED = """
from pathlib import Path
from threading import current_thread

from four_parts import ini, spool
from rlcore.__main__ import main

def watch(owner, name, word):
    call, log = getattr(owner, name), open(r"{log}", "a", buffering=1)
    def watched(*arguments):
        print(name, word(arguments), file=log)
        return call(*arguments)
    setattr(owner, name, watched)

watch(ini, "read", lambda arguments: Path(arguments[0].path).name)
watch(spool.Sender, "put", lambda arguments: current_thread().name)
watch(spool.Receiver, "receive", lambda arguments: current_thread().name)
main()
"""
"""The command line, with the calls of the package's parts in a file."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("four_parts")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(PACKAGE)]
    subprocess.run(build, capture_output=True, text=True, timeout=300, check=True)
    (wheel,) = folder.glob("four_parts-*.whl")
    assert all("rlcore" not in name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist())
    install = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, capture_output=True, text=True, timeout=300, check=True)
    return folder / "site"


@pytest.fixture
def rlcore(site):
    """Runs `rlcore` in a process that finds the wheel's parts, and returns what it prints."""

    def run(*words, code=0, program="from rlcore.__main__ import main; main()"):
        environment = os.environ | {"PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-c", program, *map(str, words)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


def test_the_parts_are_listed(rlcore):
    listing = json.loads(rlcore("plugins", "--json"))
    found = {
        kind: [row["name"] for row in listing[kind] if row["distribution"] == "four-parts" and row["state"] == "usable"]
        for kind in ("channels", "datasets", "commands", "plugins")
    }
    assert found == {"channels": ["spool"], "datasets": ["ini"], "commands": ["rows"], "plugins": ["thread"]}
    assert "carry: 17+25=" in rlcore("rows", PACKAGE / "sums.ini")


def test_they_train(rlcore, tmp_path):
    """The rows are the INI file's, and every bucket of a refit came by the channel, in the execution's thread."""
    own = [f"model.path={make_model(tmp_path / 'model')}", f"run.directory={tmp_path}", "refit.max_bucket_mib=1"]
    rlcore("train", PACKAGE / "recipe.toml", *own, program=WATCHED.format(log=tmp_path / "log"))
    calls = (tmp_path / "log").read_text().splitlines()
    assert calls.count("read sums.ini") == 1
    assert calls.count("put four-parts_0") == calls.count("receive four-parts_0") >= 2, calls
    records = [json.loads(line) for line in (tmp_path / "four-parts" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    assert len(steps) == 2
    assert all(record["token_mult_prob_error"] < 1.01 for record in steps), "generator and trainer agree after each refit"


@pytest.mark.parametrize(
    ("override", "expected", "code"),
    [
        ("refit.channel=spol", 'Did you mean "spool"?', 3),
        ("data.train.source=jsonl", 'Set data.train.source = "ini"', 2),
    ],
)
def test_their_names_are_known_to_messages(rlcore, tmp_path, override, expected, code):
    own = [f"model.path={make_model(tmp_path / 'model')}", f"run.directory={tmp_path}"]
    assert expected in rlcore("check", PACKAGE / "recipe.toml", *own, override, code=code)
