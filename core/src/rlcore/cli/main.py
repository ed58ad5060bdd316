"""The entry point: one group whose commands are imported only when they are needed."""

import sys
from importlib import import_module

import click

from rlcore import __version__
from rlcore.cli.errors import ReportingGroup
from rlcore.schema.suggestions import nearest

COMMANDS = {
    "train": "rlcore.cli.train:train_command",
    "eval": "rlcore.cli.evaluate:eval_command",
    "show": "rlcore.cli.show:show_command",
    "report": "rlcore_report.command:report_command",
    "status": "rlcore.cli.status:status_command",
    "trace": "rlcore.cli.trace:trace_command",
    "serve": "rlcore.cli.serve:serve_command",
    "check": "rlcore.cli.check:check_command",
    "plan": "rlcore_plan.command:plan_command",
    "import": "rlcore.cli.import_recipe:import_command",
    "config": "rlcore.cli.config:config_command",
    "plugins": "rlcore.cli.plugins:plugins_command",
    "new-plugin": "rlcore.cli.new_plugin:new_plugin_command",
    "verify": "rlcore.cli.verify:verify_command",
    "version": "rlcore.cli.version:version_command",
}


class LazyGroup(ReportingGroup):
    """Finds its commands in COMMANDS, so that listing plugins need not import what training does."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Every command, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. An unknown one fails with the nearest name."""
        if args[0] not in COMMANDS and (near := nearest(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)


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
    except click.Abort as error:  # click's name for Ctrl-C
        raise KeyboardInterrupt from error
