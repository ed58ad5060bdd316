"""`rlcore doctor`."""

import json
import os
import shutil
import sys

import click

SECONDS = 120.0
"""Seconds that the import of one library may take."""
_WIDTH_WITHOUT_TERMINAL = 240


@click.command("doctor")
@click.argument("recipe", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the page as JSON.")
@click.option("--no-import", is_flag=True, help="Leave out the imports of torch, vLLM, Ray and other libraries.")
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(min=1),
    default=SECONDS,
    show_default=True,
    help="Seconds for the import of one library.",
)
@click.pass_context
def doctor_command(context: click.Context, recipe: str | None, as_json: bool, no_import: bool, seconds: float) -> None:
    """Show what is installed, what does not fit together, and what mends it.

    With RECIPE, also what `rlcore check` finds of it. The exit code is 0 if everything fits, and 1 if something does not.
    """
    from rlcore_doctor.child import sigterm_raises
    from rlcore_doctor.page import lines_of
    from rlcore_doctor.report import report

    if not no_import and sys.stderr.isatty():
        click.echo(f"importing libraries, for at most {seconds:g} s each; --no-import leaves that out", err=True)
    with sigterm_raises():
        page = report(recipe, seconds, imports=not no_import)
    if as_json:
        click.echo(json.dumps(page, indent=2))
    else:
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 1)).columns
        click.echo("\n".join(lines_of(page, width)), color=False if os.environ.get("NO_COLOR") else None)
    context.exit(0 if page["fits"] else 1)
