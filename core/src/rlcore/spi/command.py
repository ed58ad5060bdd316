"""A command of the `rlcore` command line, described so that `rlcore --help` imports none.

In `pyproject.toml`::

    [project.entry-points."rlcore.commands"]
    chat = "my_package.commands:CHAT"

In `my_package/commands.py`, which imports nothing heavy::

    CHAT = CommandSpec(name="chat", spi=(2, 0), help="Talk to a model.", command="my_package.chat:chat_command")

`chat_command` is a `click.Command`. An RlcoreError that it raises ends the process with the error's message and exit code.
"""

from attrs import frozen

from rlcore.schema.printable import plain_texts

COMMAND_GROUP = "rlcore.commands"
"""Entry-point group of commands, each a CommandSpec under the command's name."""


@frozen(kw_only=True, field_transformer=plain_texts)
class CommandSpec:
    """The description of one command."""

    name: str
    """The word that follows `rlcore`; equal to the entry point's name."""
    spi: tuple[int, int]
    """The SPI version that the command was written for: (major, minor)."""
    help: str
    """Description of the command in one line, for `rlcore --help`."""
    command: str
    """`package.module:attribute` of a `click.Command`, which holds the arguments and the function to run. It is imported only
    where a user names the command."""
    priority: int = 0
    """`rlcore --help` lists the commands from the highest priority; the core's own have 10 and more."""
