"""Each command handles its arguments, and light commands start fast."""

import subprocess
import sys

import pytest

import rlcore.run.plan.prepare
from rlcore import __version__
from rlcore.__main__ import main
from rlcore.registry.run_parts import commands

from .conftest import prepared

COMMANDS = {state.entry.name: state.entry for state in commands()}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.output


@pytest.mark.parametrize("entry", COMMANDS.values(), ids=COMMANDS)
def test_the_description_of_a_command_is_the_first_line_of_its_help(entry) -> None:
    assert entry.load().help.partition("\n")[0] == entry.provider.help


def test_the_group_lists_every_command_by_priority(invoke) -> None:
    lines = invoke("--help").output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("   ")] == list(COMMANDS)


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rlcore", "--version"], check=True, capture_output=True, text=True, timeout=300
    )
    assert result.stdout == f"rlcore {__version__}\n"


INTERRUPTED_IMPORT = """
import os, signal, sys

module = sys.argv.pop(1)

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, AtImport())
from rlcore.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "module", ["rlcore.cli.main", "click", "rlcore.schema.problem", "rlcore.cli.train", "rlcore.config.load"]
)
def test_ctrl_c_while_modules_are_imported_ends_with_its_code_and_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, "train", "recipe.toml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (130, "error: interrupted\n")


def test_ctrl_c_before_a_command_is_found_ends_with_its_code(monkeypatch, capsys) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlcore.cli.main.LazyGroup.parse_args", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == "error: interrupted"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["plugins"], 0, ""),
        (["--help"], 0, ""),
        (["trian"], 2, "No such command 'trian'. Did you mean \"train\"?"),
        (["train"], 2, "Missing argument 'RECIPE'"),
        (["check", "none.toml"], 2, "none.toml"),
    ],
)
def test_commands_end_with_their_codes(monkeypatch, capsys, arguments: list[str], code: int, told: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rlcore", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    assert told in capsys.readouterr().err


HEAVY = ("torch", "transformers", "ray", "pyarrow", "matplotlib", "datasets", "numpy")


@pytest.mark.parametrize("command", [["--help"], ["plugins"]])
def test_light_commands_import_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom rlcore.cli.main import cli\n"
        "assert 'numpy' not in sys.modules, 'no one reports a Ctrl-C before the command runs'\n"
        f"try: cli({command!r})\nexcept SystemExit as end: assert not end.code, end\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_a_gpu_that_is_not_there_is_said_before_anything_else(invoke, calls, monkeypatch, command: str) -> None:
    gpu = prepared()
    gpu.device = "cuda"
    monkeypatch.setattr(rlcore.run.plan.prepare, "prepare", lambda *_, **__: gpu)
    monkeypatch.setattr(rlcore.run.plan.prepare, "detect_device", lambda: "cpu")
    result = invoke(command, "r.toml")
    assert result.exit_code == 2
    assert 'run.device: found "cuda", and no GPU' in result.stderr
    assert calls.trained == calls.evaluated == []
    monkeypatch.setattr(rlcore.run.plan.prepare, "detect_device", lambda: "cuda")
    assert invoke(command, "r.toml").exit_code == 0
