"""The package of docs/plugins.md, written out from its blocks: it passes its own tests and is found when it is installed."""

import atexit
import importlib.util
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from data_support import rows_of_file
from markdown_blocks import ROOT, write_files

from rlcore.cli.main import cli
from rlcore.registry.run_parts import collector
from rlcore.spi import ChannelOptions, DataError, ReceiverRank, installed_data_sources
from rlcore_torchkit.testing.models import make_model

PACKAGE = Path(tempfile.mkdtemp(prefix="rlcore-acme-"))
atexit.register(shutil.rmtree, PACKAGE, ignore_errors=True)
WRITTEN = {str(path.relative_to(PACKAGE)) for path in write_files(ROOT / "docs" / "plugins.md", PACKAGE)}
sys.path.insert(0, str(PACKAGE / "src"))


def load(file):
    spec = importlib.util.spec_from_file_location(f"acme_{Path(file).stem}", PACKAGE / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kit, training = load("tests/test_acme.py"), load("tests/test_training.py")
TestPlainTrainer, TestPlainGenerator = kit.TestPlainTrainer, kit.TestPlainGenerator
TestLongest, TestReinforce, TestMoving = kit.TestLongest, kit.TestReinforce, kit.TestMoving


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package's metadata, as an installer would write them."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "site" / f"rlcore_acme-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(metadata.parent))


def test_the_page_holds_the_whole_package():
    modules = {
        f"src/acme/{name}.py"
        for name in (
            "longest",
            "reinforce",
            "moving",
            "best",
            "slowest",
            "commands",
            "worst",
            "executions",
            "worker_thread",
            "parts",
            "spool",
            "ini",
            "collectors",
            "first_turns",
            "provider",
            "trainer",
            "generator",
        )
    }
    assert {"pyproject.toml", "recipe.toml", "tests/test_acme.py", "tests/test_training.py", *modules} == WRITTEN


@pytest.mark.usefixtures("installed")
def test_every_plugin_is_found_and_usable():
    listing = json.loads(CliRunner().invoke(cli, ["plugins", "--json"]).stdout)
    found = {(row["role"], row["name"]): row for row in listing["plugins"] if row["distribution"] == "rlcore-acme"}
    assert set(found) == {
        ("environment", "longest"),
        ("algorithm", "reinforce"),
        ("algorithm", "moving"),
        ("trainer", "plain"),
        ("generator", "plain"),
        ("sink", "best"),
        ("execution", "worker_thread"),
    }
    assert all(row["usable"] for row in found.values()), found
    (observer,) = (row for row in listing["observers"] if row["name"] == "slowest")
    assert observer["error"] is None
    (command,) = (row for row in listing["commands"] if row["name"] == "worst")
    assert command["error"] is None
    assert collector("episodes").name == "first_turns"


@pytest.mark.usefixtures("installed")
def test_a_run_with_every_plugin(tmp_path):
    training.test_a_run_with_everything(tmp_path)
    assert (tmp_path / "longest" / "summary.json").is_file()
    assert (tmp_path / "longest" / "best.txt").read_text().split()[2] == "response_length_mean"
    worst = CliRunner().invoke(cli, ["worst", str(tmp_path / "longest")])
    assert worst.exit_code == 0
    assert "reward_mean" in worst.stdout
    refused = CliRunner().invoke(cli, ["worst", str(tmp_path)])
    assert (refused.exit_code, "expected the directory of a run" in refused.stderr) == (4, True)


@pytest.mark.usefixtures("installed")
def test_the_same_run_in_a_worker_thread(tmp_path):
    model = make_model(tmp_path / "model")
    own = [f"model.path={model}", f"run.directory={tmp_path}", "run.num_steps=1", "run.name=threaded"]
    plan = CliRunner().invoke(cli, ["check", str(PACKAGE / "recipe.toml"), *own, "cluster.execution=worker_thread"])
    assert plan.exit_code == 0, plan.output
    assert "worker_thread 0.1.0 of rlcore-acme (named)" in plan.output
    result = CliRunner().invoke(cli, ["train", str(PACKAGE / "recipe.toml"), *own, "cluster.execution=worker_thread"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "threaded" / "summary.json").is_file()


@pytest.mark.usefixtures("installed")
def test_the_environments_check_refuses_its_options():
    training.test_too_many_words_are_refused()


@pytest.mark.usefixtures("installed")
def test_a_run_with_the_moving_baseline_goes_on_with_it(tmp_path):
    """In a second process the mean moves on from where the first one left it."""
    model = make_model(tmp_path / "model")
    own = [f"model.path={model}", f"run.directory={tmp_path}", "algorithm.name=moving", "run.name=moving"]
    arguments = ["train", str(PACKAGE / "recipe.toml"), *own]
    for steps, more in (("1", []), ("2", ["--resume"])):
        result = CliRunner().invoke(cli, [*arguments, f"run.num_steps={steps}", *more])
        assert result.exit_code == 0, result.output
    states = [
        json.loads((tmp_path / "moving" / "checkpoints" / f"step-{step:06d}" / "algorithm" / "state.json").read_text())
        for step in (1, 2)
    ]
    records = [json.loads(line) for line in (tmp_path / "moving" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward_mean"] for record in records if record["step"] > 0]
    baselines = [state["numbers"]["baseline"] for state in states]
    assert baselines[0] == pytest.approx(0.9 * 0.5 + 0.1 * rewards[-2], abs=1e-6)
    assert baselines[1] == pytest.approx(0.9 * baselines[0] + 0.1 * rewards[-1], abs=1e-6)


def test_the_observer_notices_a_slow_call(capsys, monkeypatch):
    from acme import slowest

    observer = slowest.Slowest()
    for seconds in (1.0, 1.0, 3.5):
        ticks = iter((0.0, seconds))
        monkeypatch.setattr(slowest.time, "perf_counter", lambda ticks=ticks: next(ticks))
        wrapper = observer.train_step(None)
        next(wrapper)
        with pytest.raises(StopIteration) as returned:
            wrapper.send("result")
        assert returned.value.value == "result"
    assert capsys.readouterr().err == "train_step took 3.50 s; its median is 1.00 s\n"


def test_the_channel_brings_buckets(tmp_path):
    from acme import parts

    sender = parts.SPOOL.make_sender(ChannelOptions(directory=str(tmp_path)), torch.device("cpu"))
    (options,) = sender.connect([ReceiverRank(replica=0, rank=0, pid=1, host="here", device="cpu")])
    receiver = parts.SPOOL.make_receiver(torch.device("cpu"), 0, options)
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.ones(3, dtype=torch.bfloat16)]
    received = receiver.receive(sender.put(0, tensors), tensors).tensors
    assert all(torch.equal(found, sent) for found, sent in zip(received, tensors, strict=True))
    sender.acknowledged(0)
    sender.close()
    assert not list(tmp_path.iterdir())


def test_the_data_source_reads_sections(tmp_path, monkeypatch):
    from acme import parts

    monkeypatch.setitem(installed_data_sources(), "ini", parts.INI)
    (tmp_path / "sums.ini").write_text("[easy]\nprompt = 1+1=\nanswer = 2\n[large]\nprompt = 99+99=\nanswer = 198\n")
    (tmp_path / "none.ini").write_text("no section")
    rows = rows_of_file("ini", tmp_path / "sums.ini")
    assert [dict(row) for row in rows] == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "99+99=", "answer": "198"}]
    with pytest.raises(DataError, match="none.ini"):
        rows_of_file("ini", tmp_path / "none.ini")
