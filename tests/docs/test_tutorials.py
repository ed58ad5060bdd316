"""Tutorials, run as a reader runs them: each command works, and prints what the page shows."""

import os

import pytest
from click.testing import CliRunner
from markdown_blocks import write_files
from tutorial_pages import FOLDER, PROGRAMS, TUTORIALS, commands, outline, portable, run

from rlcore.cli.main import cli

TRAINED_ELSEWHERE = {
    "5-backends-for-gpus.md": "its imports take longer than all tutorials; tests/system/test_megatron.py trains",
    "6-several-processes-and-nodes.md": "starting Ray takes longer than all tutorials; tests/system/test_cluster.py trains",
}
"""Tutorials of which recipes and options are checked, but nothing is trained: why, and what trains instead."""
DEPENDS_ON_WHAT_IS_INSTALLED = ("rlcore", "plugins")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.wide(keep=["1-first-run.md"])
@pytest.mark.parametrize("document", TUTORIALS, ids=lambda path: path.name)
def test_commands_print_what_the_page_shows(document, folder):
    write_files(document, folder)
    for command in commands(document):
        if command.words[0] not in PROGRAMS or command.words == DEPENDS_ON_WHAT_IS_INSTALLED:
            continue
        if document.name in TRAINED_ELSEWHERE and command.words[1] == "train":
            result = CliRunner().invoke(cli, ["check", *command.words[2:]])
            assert result.exit_code == 0, result.output
            continue
        printed = {outline(line) for line in portable(run(command.words)).splitlines()}
        missing = [line for line in map(outline, command.shown) if line not in printed]
        assert not missing, f"{' '.join(command.words)} prints none of {missing}; put its output into {document.name}"


@pytest.mark.parametrize("document", TUTORIALS, ids=lambda path: path.name)
def test_outputs_are_shown_and_say_nothing_of_the_machine_they_were_made_on(document):
    shown = [command for command in commands(document) if command.shown]
    assert len(shown) >= 2
    text = document.read_text()
    assert "OUT\n" not in text, "tests/docs/tutorial_pages.py puts the outputs in"
    assert str(os.path.expanduser("~")) not in text.replace(FOLDER, "")
    assert "/tmp/" not in text


def test_every_tutorial_but_those_listed_is_run():
    names = {document.name for document in TUTORIALS}
    assert len(names) >= 6
    assert TRAINED_ELSEWHERE.keys() <= names
    for command in commands(TUTORIALS[0]):
        assert command.words[0] in PROGRAMS
