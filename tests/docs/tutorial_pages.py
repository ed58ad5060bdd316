"""Running a tutorial as a reader does: its files, then its commands in order, in one folder; and what they print."""

import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from click.testing import CliRunner
from markdown_blocks import ROOT, blocks, write_files

from rlcore.cli.main import cli

FOLDER = "/home/me/tutorial"
"""What stands on the pages for the folder that their commands run in."""
PROGRAMS = ("python", "rlcore")
"""What is run; the rest of a console block installs packages or starts Ray."""
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@frozen
class Command:
    """One command of a console block, and the lines that the page shows below it."""

    words: tuple[str, ...]
    shown: tuple[str, ...]


def commands(document: Path) -> Iterator[Command]:
    for block in blocks(document):
        if block.language == "console":
            for text in block.text.removeprefix("$ ").split("\n$ "):
                line, *shown = text.rstrip("\n").split("\n")
                yield Command(tuple(shlex.split(line)), tuple(shown))


def run(words: tuple[str, ...]) -> str:
    """What a command prints that runs in this process: a script in the working directory, or rlcore."""
    program, *arguments = words
    assert program in PROGRAMS
    if program == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(arguments[0], run_name="__main__")
        return printed.getvalue()
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, f"rlcore {' '.join(arguments)}:\n{result.output}"
    return result.output


def outline(line: str) -> str:
    """A line without what differs between machines and days: figures, the widths that follow from them, phases too short to be
    shown; nothing of a line of a curve, of a sample, or of the table of times."""
    if re.search(r"[│┤]|^ +\||%$|^in all | ago$", line):
        return ""
    text = re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "0", line)
    text = re.sub(r"process 0 on \S+", "process 0 on HOST", re.sub(r"(?<= s )\(\w+ 0[^)]*\)|, (length|stop)$", "", text))
    return re.sub(r"[\s─-]+", " ", text).strip()


def portable(output: str) -> str:
    """An output without the folder that it was made in."""
    return output.replace(str(Path.cwd()), FOLDER)


def rewrite(document: Path) -> None:
    """Put what the commands print into a tutorial's console blocks; the working directory is the one to run in."""
    write_files(document, Path.cwd())
    text = document.read_text()
    for command in commands(document):
        if command.words[0] not in PROGRAMS:
            continue
        printed = "\n".join(line.rstrip() for line in portable(run(command.words)).rstrip().splitlines())
        if command.shown:
            line = f"$ {shlex.join(command.words)}\n"
            text = text.replace(line + "\n".join(command.shown) + "\n", line + printed + "\n", 1)
    document.write_text(text)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
