"""The command `rlcore rows`."""

from configparser import ConfigParser

import click


@click.command("rows")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def rows_command(file):
    """Print the name and the prompt of each row of an INI file."""
    parser = ConfigParser(interpolation=None)
    parser.read(file, encoding="utf-8")
    for section in parser.sections():
        click.echo(f"{section}: {parser[section]['prompt']}")
