"""The command `rlcore report`."""

from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("-o", "--output", type=click.Path(path_type=Path), default="report.html", show_default=True, help="The file.")
@click.option("--title", help="What stands above; by default the names of the runs.")
def report_command(runs: tuple[Path, ...], output: Path, title: str | None) -> None:
    """Write one HTML page about one or more runs.

    RUN is a run directory; the curves of several lie above each other. The page needs no network and no other file.
    """
    from rlcore.files import NAMED_OUTPUT, write_atomically
    from rlcore_report.data import report_data
    from rlcore_report.page import page

    data = report_data(runs)
    write_atomically(output, page(data, title or ", ".join(run["label"] for run in data["runs"])), NAMED_OUTPUT)
    click.echo(f"{output} ({output.stat().st_size / 2**20:.1f} MiB): open it in a browser")
