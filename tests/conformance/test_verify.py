"""`rlcore verify` on installed plugins, with the kit in a process of its own."""

import json
import os

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli

BROKEN = '''
import os

from attrs import frozen

from rlcore.spi import Provider


@frozen(kw_only=True)
class Config:
    """Of both."""

    ends: int = -1
    """The code with which closing it ends the process, if any."""


class Forgetful:
    def __init__(self, context, config):
        self.config = config

    def log(self, step, metrics):
        print("noise on standard output")

    def close(self, summary):
        if self.config.ends >= 0:
            os._exit(self.config.ends)
        if summary is None:
            raise ValueError("no summary: an early end")


PROVIDER = Provider(name="forgetful", spi=(2, 0), config=Config, backend="forgetful_sink:Forgetful")
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A sink that cannot end early, here and in processes that are started from here."""
    (tmp_path / "forgetful_sink.py").write_text(BROKEN)
    metadata = tmp_path / "acme_sink-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sink\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlcore.sinks]\nforgetful = forgetful_sink:PROVIDER\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))


def test_a_good_plugin_passes():
    result = CliRunner().invoke(cli, ["verify", "arithmetic", "num_train=8", "num_evaluation=8", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["role"], report["distribution"]) == ("environment", "rlcore-math")
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert outcomes["test_splits_share_no_row"] == "passed"
    assert outcomes["test_it_goes_on_after_close"] == "skipped"
    (skipped,) = (check for check in report["checks"] if check["name"] == "test_it_goes_on_after_close")
    assert skipped["reason"] == "arithmetic has no method close"


@pytest.mark.usefixtures("installed")
def test_what_is_wrong_is_shown():
    result = CliRunner().invoke(cli, ["verify", "forgetful"])
    assert result.exit_code == 1
    assert "2 passed, 3 failed, 0 skipped" in result.stdout
    assert "no summary: an early end" in result.stdout


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_ends_the_process_is_told():
    """Also by a code that the kit has: checks that did not run have not passed."""
    result = CliRunner().invoke(cli, ["verify", "forgetful", "ends=1"])
    assert result.exit_code == 12
    assert "ended with code 1 before it was done" in result.stderr


@pytest.mark.usefixtures("installed")
def test_what_lies_beside_it_in_the_folder_for_temporary_files_is_not_run(tmp_path, monkeypatch):
    """Anyone may write there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("test_stray.py", "conftest.py"):
        (shared / name).write_text("raise RuntimeError('a stray file was run')\n")
    monkeypatch.setenv("TMPDIR", str(shared))
    result = CliRunner().invoke(cli, ["verify", "forgetful"])
    assert result.exit_code == 1, result.output
    assert "2 passed, 3 failed, 0 skipped" in result.stdout
