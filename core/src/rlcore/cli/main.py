"""The entry point: one group, whose commands are entry points of the group `rlcore.commands`."""

import sys

import click

from rlcore import __version__
from rlcore.cli.errors import COMMAND_OWNER, ReportingGroup, report
from rlcore.installed import DistributionError
from rlcore.schema.printable import printable


class LazyGroup(ReportingGroup):
    """Finds its commands by their entry points, and imports only the one that runs."""

    # Functions import the registry: a Ctrl-C while that is imported is reported only within a call.
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """List every usable command, by priority."""
        from rlcore.registry.run_parts import commands

        return [state.entry.name for state in commands() if state.is_usable]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write what each command does, or why it cannot be used. No command is imported."""
        from rlcore.registry.run_parts import commands
        from rlcore.registry.states import MAX_REASON_CHARACTERS

        rows = {
            (state.entry.name, state.entry.provider.help if state.is_usable and state.entry.provider else state.text): None
            for state in commands()
            if state.kind != "disabled"
        }  # commands of one name have one text
        with formatter.section("Commands"):
            formatter.write_dl([(printable(name), printable(text, MAX_REASON_CHARACTERS)) for name, text in rows])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command. PluginError where it is not usable, or where its package is not installed."""
        from rlcore.installed import CORE
        from rlcore.registry.run_parts import find_command

        entry = find_command(cmd_name)
        if entry is None:
            return None
        if entry.distribution != CORE:
            ctx.meta[COMMAND_OWNER] = entry.label
        return entry.load()

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. An unknown one fails with the nearest name."""
        from rlcore.published_plugins import how_to_install

        command = self.get_command(ctx, args[0])
        if command is None:
            hint = how_to_install("command", args[0], self.list_commands(ctx))
            ctx.fail(f"No such command {args[0]!r}. {hint}".rstrip())
        return args[0], command, args[1:]


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rlcore", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, envvar="RLCORE_DEBUG", help="Show the traceback of an error (also RLCORE_DEBUG=1).")
def cli(debug: bool) -> None:
    """Post-train language models with reinforcement learning, on any backend.

    A recipe is a TOML file; docs/config.md lists its keys and docs/cli.md the exit codes.
    """


def main() -> None:
    """Run the command that the arguments name, and end the process. KeyboardInterrupt on Ctrl-C outside of the command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark in its place, not the run an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(cli.main(prog_name="rlcore", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DistributionError as error:  # of a list of commands
        report(str(error))
        sys.exit(error.exit_code)
    except click.Abort as error:  # click's name for Ctrl-C
        raise KeyboardInterrupt from error
