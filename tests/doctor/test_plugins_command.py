"""`rlcore plugins`: the listing and the JSON, and what they cost."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from rlcore.registry.discovery import discover
from rlcore.spi import SPI_VERSION
from rlcore.spi.provider import FUNCTION_KINDS
from rlcore_doctor.plugins_command import plugins_command, plugins_json

WATCH = """
from rlcore.spi import hookimpl

class Watch:
    @hookimpl(wrapper=True)
    def close(self, request):
        return (yield)

WATCH = Watch()
"""


@pytest.fixture
def installed(installer):
    """Trainers that are good, better, unavailable, and broken; one observer."""
    installer.trainer("good", priority=10, capabilities=["residency", "entropy"])
    installer.trainer("better", version="3.1", priority=20, devices=["cuda"])
    installer.add("acme-broken", {"rlcore.trainers": {"broken": "broken_listed:PROVIDER"}}, broken_listed="1 / 0\n")
    installer.add("acme-watch", {"rlcore.observers": {"watch": "listed_watch:WATCH"}}, listed_watch=WATCH)
    return installer


def run(*arguments):
    result = CliRunner().invoke(plugins_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_holds_every_column(installed):
    listing = json.loads(run("--json", "--device", "cpu"))
    rows = {row["name"]: row for row in listing["plugins"]}
    assert rows["good"] == {
        "role": "trainer",
        "name": "good",
        "distribution": "acme-good",
        "version": "1.0",
        "spi": [2, 0],
        "priority": 10,
        "capabilities": ["entropy", "residency"],
        "devices": ["cpu", "cuda"],
        "disabled": False,
        "state": "usable",
        "usable": True,
        "reason": None,
        "auto": True,
    }
    assert "ZeroDivisionError" in rows["broken"]["reason"]
    assert rows["broken"]["spi"] is None
    assert listing["spi"] == list(SPI_VERSION)
    assert listing["device"] == "cpu"
    assert [(observer["name"], observer["global"]) for observer in listing["observers"]] == [("watch", False)]


UNNAMED = {
    "collectors": ("CollectorProvider", "collector='acme_of_runs:Object', priority=60"),
    "tokenizers": ("TextProvider", "backend='acme_of_runs:Object', priority=60"),
    "renderers": ("TextProvider", "backend='acme_of_runs:Object', priority=60"),
    "loop_observers": ("LoopObserverProvider", "observer='acme_of_runs:Object'"),
}


@pytest.mark.parametrize(("group", "described"), UNNAMED.items(), ids=UNNAMED)
def test_what_no_recipe_names_is_listed_too(installer, group, described):
    kind, fields = described
    source = f"from rlcore.spi import {kind}\nObject = {kind}(name='acme', spi=(2, 0), {fields})\n"
    installer.add("acme-of-runs", {f"rlcore.{group}": {"acme": "acme_of_runs:Object"}}, acme_of_runs=source)
    installer.add("acme-broken", {f"rlcore.{group}": {"broken": "broken_of_runs:Object"}}, broken_of_runs="1 / 0\n")
    listed = {row["name"]: row for row in json.loads(run("--json"))[group]}
    assert (listed["acme"]["state"], listed["acme"]["spi"], listed["broken"]["spi"]) == ("usable", [2, 0], None)
    assert "ZeroDivisionError" in listed["broken"]["error"]
    assert "priority 60" in run("--verbose") or group == "loop_observers"


NOT_IMPORTED = sorted({"architecture", *FUNCTION_KINDS})


@pytest.mark.parametrize("kind", NOT_IMPORTED)
def test_functions_of_every_kind_are_listed_and_not_imported(installer, monkeypatch, kind):
    group, module = f"rlcore.{kind}s", f"acme_{kind}_that_fails"
    points = {"kept": f"{module}:function", "left_out": f"{module}:function"}
    installer.add("acme-functions", {group: points}, **{module: "1 / 0\n"})
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", f"{kind}:left_out")
    rows = {row["name"]: row for row in json.loads(run("--json"))[f"{kind}s"]}
    assert {name: row["disabled"] for name, row in rows.items()} == {"kept": False, "left_out": kind != "architecture"}
    assert (rows["kept"]["distribution"], rows["kept"]["version"]) == ("acme-functions", "1.0")
    lines = run().splitlines()
    heading = lines.index(kind.replace("_", " "))
    assert [line.split(maxsplit=1) for line in lines[heading + 1 : heading + 3]] == [
        ["kept", "installed by acme-functions 1.0"],
        ["left_out", "installed by acme-functions 1.0" if kind == "architecture" else "disabled (acme-functions 1.0)"],
    ]
    assert module not in sys.modules


def test_auto_depends_on_the_device_and_not_on_the_broken_one(installed):
    for device, name in (("cpu", "good"), ("cuda", "better")):
        listing = json.loads(run("--json", "--device", device))
        assert listing["auto"]["trainer"] == {"name": name, "error": None}
        assert [row["name"] for row in listing["plugins"] if row["auto"]] == [name]


def by_name(output):
    """The line of each plugin of the listing, without its name."""
    lines = (line.strip().partition(" ") for line in output.splitlines() if line.startswith("  "))
    return {name: rest.strip() for name, _, rest in lines}


def test_the_listing_shows_what_is_wrong_and_what_auto_would_do(installed, monkeypatch):
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "absent")
    monkeypatch.setenv("COLUMNS", "400")
    output = run("--device", "cpu")
    lines = by_name(output)
    assert lines["broken"].startswith("not usable (acme-broken 1.0): import failed in broken_listed")
    assert " ".join(lines["good"].split()) == "auto usable"
    assert lines["better"].startswith("usable; meant for cuda")
    assert "warning: 'absent' is to be disabled, but no such plugin is installed" in output


def test_the_listing_marks_what_auto_takes(installed, monkeypatch):
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "acme-broken,watch")
    lines = by_name(run("--device", "cpu"))
    assert [name for name, line in lines.items() if line.startswith("auto ")] == ["good"]
    assert [name for name, line in lines.items() if line.startswith("disabled (acme-")] == ["broken", "watch"]


def test_the_listing_says_which_observers_are_in_use(installed):
    installed.add("acme-guard", {"rlcore.global_observers": {"guard": "listed_watch:WATCH"}})
    lines = by_name(run("--device", "cpu"))
    assert lines["watch"] == "usable, by its name in observers.names"
    assert " ".join(lines["guard"].split()) == "global in use in every run"


def test_gpu_is_another_word_for_cuda(installed):
    assert json.loads(run("--json", "--device", "gpu"))["device"] == "cuda"


def test_where_plugins_come_from_and_what_they_can_do_is_for_verbose(installed):
    assert "entropy" not in run("--device", "cpu")
    lines = [line.strip() for line in run("--device", "cpu", "--verbose").splitlines()]
    assert "acme-better 3.1, SPI 2.0, priority 20" in lines
    assert "entropy, residency" in lines
    assert "acme-watch 1.0" in lines


@pytest.mark.parametrize("width", [24, 40, 60, 80])
@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_the_listing_fits_any_width_and_leaves_nothing_out(installed, monkeypatch, width, options):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("--device", "cpu", *options).splitlines()
    assert max(map(len, lines)) <= width
    narrow = "".join(lines).replace(" ", "")
    monkeypatch.setenv("COLUMNS", "400")
    wide = run("--device", "cpu", *options)
    assert sorted(narrow) == sorted("".join(wide.split()))


def test_what_is_missing_for_a_run_is_told_with_what_installs_it(installed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    line = "pip install rlcore-transformers rlcore-grpo rlcore-math"
    assert (
        f"missing for a run with rewards: generator, algorithm, environment. Run: {line}" in run("--device", "cpu").splitlines()
    )
    listing = json.loads(run("--json", "--device", "cpu"))
    assert listing["missing"] == {"roles": ["generator", "algorithm", "environment"], "install": line}


def test_an_empty_environment_lists_nothing(installer):
    assert plugins_json(discover(), "cpu")["plugins"] == []
    assert "Plugins for rlcore" in run("--device", "auto")


def test_executions_are_listed_with_the_one_that_auto_takes():
    """The core's own where the recipe has no [cluster]."""
    listing = plugins_json(discover(), "cpu")
    own = next(row for row in listing["plugins"] if (row["role"], row["name"]) == ("execution", "in_process"))
    assert (own["distribution"], own["state"], own["auto"]) == ("rlcore", "usable", True)
    assert listing["auto"]["execution"] == {"name": "in_process", "error": None}


SCRIPT = """
import sys
from rlcore.cli.main import main
sys.argv = ["rlcore", "plugins"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = {"numpy", "torch", "transformers", "ray", "pandas", "pyarrow", "matplotlib", "plotext", "datasets", "scipy", "sympy"}
print(sorted(heavy & sys.modules.keys()))
"""


def test_the_listing_of_all_installed_packages_imports_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"spi": None},
        {"spi": 2},
        {"spi": (2.0, 0.0)},
        {"spi": (3, 0), "priority": {1}},
        {"priority": {1}},
        {"spi": None, "capabilities": [1, "residency"]},
        {"spi": None, "devices": [1, "cpu"]},
    ],
    ids=str,
)
def test_a_provider_with_any_fields_is_listed(installer, options):
    installer.trainer("odd", **options)
    (row,) = (row for row in json.loads(run("--json"))["plugins"] if row["name"] == "odd")
    spi = [3, 0] if options.get("spi") == (3, 0) else [2, 0] if "spi" not in options else None
    assert (row["spi"], row["priority"], row["capabilities"], row["devices"]) == (spi, None, None, None)
    for words in ((), ("--verbose",)):
        assert row["state"] in run(*words)
