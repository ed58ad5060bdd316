"""Commands of other packages: found by their entry points, imported when they run, and refused with the reason."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.published_plugins import published
from rlcore.registry.discovery import discover
from rlcore.registry.run_parts import commands
from rlcore_doctor.plugins_command import added_commands, plugins_json

DESCRIPTION = """
from rlcore.spi import CommandSpec
FIELDS = {"name": "chat", "spi": (2, 0), "help": "Talk to a model.", "command": "acme_chat:chat"}
CHAT = CommandSpec(**{**FIELDS, **FIELDS_HERE})
"""
COMMAND = """
import click
from rlcore.spi import DataError

@click.command()
@click.argument("words", nargs=-1)
def chat(words):
    if "data" in words:
        raise DataError("no words are left")
    if "defect" in words:
        raise KeyError("words")
    click.echo(f"said {' '.join(words)}")

not_a_command = "text"
"""


@pytest.fixture
def add(installer):
    """Installs a package with the command `chat`; `fields` replace those of its description."""

    def add(distribution: str = "acme", source: str = DESCRIPTION, code: str = COMMAND, **fields: object) -> None:
        module = f"{distribution.replace('-', '_')}_described"
        described = source.replace("FIELDS_HERE", repr(fields))
        modules = {module: described} if "acme_chat" in installer.modules else {module: described, "acme_chat": code}
        installer.add(distribution, {"rlcore.commands": {"chat": f"{module}:CHAT"}}, **modules)

    return add


def invoke(*arguments: str):
    return CliRunner().invoke(cli, arguments)


def listed() -> str:
    """The table of `rlcore --help`, its line breaks removed."""
    return " ".join(invoke("--help").output.partition("Commands:\n")[2].split())


def test_a_command_of_another_package_is_listed_and_runs(add) -> None:
    add()
    assert "chat Talk to a model." in listed()
    assert invoke("chat", "two", "words").output == "said two words\n"
    (state,) = [state for state in added_commands() if state.entry.name == "chat"]
    assert (state.entry.origin, state.entry.priority) == ("acme 1.0", 0)


def test_its_errors_end_with_their_codes_and_name_it(add) -> None:
    add()
    refused, defect = invoke("chat", "data"), invoke("chat", "defect")
    assert (refused.exit_code, refused.stderr) == (4, "error: no words are left\n")
    assert defect.exit_code == 70
    assert "It comes from command 'chat' (acme 1.0)" in defect.stderr


UNUSABLE = {
    "import": (
        {"source": "import no_such_library\n"},
        "not usable: import failed in acme_described, line 1: ModuleNotFoundError",
    ),
    "panic": ({"source": "class Panic(BaseException): ...\nraise Panic('x')\n"}, "not usable: import failed in acme_described"),
    "kind": ({"source": "CHAT = 'chat'\n"}, "not usable: the entry point names a str; expected an instance of rlcore.spi"),
    "name": ({"name": "talk"}, "not usable: the command calls itself 'talk', its entry point 'chat'; expected one name"),
    "help": ({"help": "One.\nTwo."}, "not usable: help is 'One.\\nTwo.'; expected one line"),
    "path": ({"command": "acme chat"}, "not usable: command is 'acme chat'; expected 'package.module:name'"),
    "priority": ({"priority": "high"}, "not usable: priority is 'high'; expected an integer"),
    "module": ({"command": "gone:chat"}, "not usable: it names 'gone:chat', but there is no module 'gone'"),
    "interface": ({"spi": (99, 0)}, "of another interface: written for SPI 99.0, but this rlcore has SPI"),
}


@pytest.mark.parametrize(("changes", "text"), UNUSABLE.values(), ids=UNUSABLE)
def test_one_that_cannot_be_used_is_listed_with_its_reason_and_stops_no_other(add, changes, text) -> None:
    source = {"source": changes.pop("source")} if "source" in changes else {}
    add(**source, **changes)
    assert f"chat {text}" in listed()
    refused = invoke("chat")
    assert (refused.exit_code, refused.stderr.startswith(f"error: command 'chat' is {text}")) == (3, True)
    (row,) = [row for row in plugins_json(discover(), "cpu", added_commands())["commands"] if row["name"] == "chat"]
    assert text.startswith(f"{row['state']}: {row['error'][:20]}")
    assert invoke("plugins").exit_code == 0


def test_one_that_is_no_command_is_refused(add) -> None:
    add(command="acme_chat:not_a_command")
    refused = invoke("chat")
    assert (refused.exit_code, refused.stderr.startswith("error: command 'chat' (acme 1.0) cannot be used: ")) == (3, True)
    assert "'acme_chat:not_a_command' is a str; expected a click.Command" in refused.stderr


def test_a_duplicate_is_refused_until_one_package_is_disabled(add, monkeypatch) -> None:
    add("acme", help="The first.")
    add("rlcore-other", help="The second.")
    duplicate = (
        "a duplicate name: acme 1.0 and rlcore-other 1.0 provide it; keep one: set RLCORE_DISABLE_PLUGINS=acme, "
        "or uninstall the other"
    )
    assert listed().count(f"chat {duplicate}") == 1
    assert invoke("chat").stderr == f"error: command 'chat' is {duplicate}\n"
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "acme")
    assert "chat The second." in listed()
    assert invoke("chat").output == "said \n"
    assert discover().warnings == ()
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "command:chat")
    assert "chat" not in listed()
    assert invoke("chat").stderr == "error: command 'chat' is disabled\n"


def test_a_recipe_cannot_disable_a_command_and_is_told_so(add) -> None:
    add()
    assert "plugins.disable does not disable 'command:chat'" in discover(["command:chat"]).warnings[0]


@pytest.mark.parametrize(("priority", "place"), [(1000, 0), (0, -1)])
def test_commands_are_ranked_by_priority(add, priority, place) -> None:
    add(priority=priority)
    assert [state.entry.name for state in commands()][place] == "chat"


def test_a_released_command_that_is_not_installed_is_refused_with_the_line_that_installs_it(installer, monkeypatch) -> None:
    monkeypatch.setattr("rlcore.registry.run_parts.published", lambda: {**published(), "command": {"fly": "rlcore-fly"}})
    monkeypatch.setattr("rlcore.published_plugins.published", lambda: {"command": {"fly": "rlcore-fly"}})
    refused, near = invoke("fly"), invoke("flyy")
    assert (refused.exit_code, refused.stderr) == (3, "error: command 'fly' is not installed. Run: pip install rlcore-fly\n")
    assert near.exit_code == 2
    assert "No such command 'flyy'. Did you mean \"fly\"? Run: pip install rlcore-fly" in near.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["check", "none.toml"]])
def test_no_command_but_the_one_that_runs_is_imported(arguments) -> None:
    code = (
        "import sys\nfrom rlcore.registry.run_parts import commands\nfrom rlcore.cli.main import cli\n"
        f"try: cli({arguments!r})\nexcept SystemExit: pass\n"
        "others = [state.entry.provider.command.partition(':')[0] for state in commands() if state.entry.name != sys.argv[1]]\n"
        "found = [name for name in others if name in sys.modules]\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code, arguments[0]], check=True, capture_output=True, timeout=60)
