"""`rlcore certify`: one page of which proofs a run holds."""

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from rlcore.files import NAMED_OUTPUT, write_atomically
from rlcore.spi import ConfigError, Problem
from rlcore_bundles.certificate.certificate import Certificate, certificate

NOT_HELD = 1
"""The exit code where a claim does not hold."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The page, as Markdown, and beside it a .json; by default print it."
)
@click.option("--replay", "replays", is_flag=True, help="Compute the run's bundles again.")
@click.option("--trust-remote-code", "trusts", is_flag=True, help="Execute code that comes with a model, if the recipe does.")
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON.")
def certify_command(run: Path, output: Path | None, replays: bool, trusts: bool, as_json: bool) -> None:
    """Write one page: which proofs a run holds.

    It reads the directory RUN alone. The exit code is 1 where a claim does not hold.
    """
    problems = [] if output is None else list(_page_problems(output))
    if trusts and not replays:
        problems.append(Problem(path="--trust-remote-code", found="the option, without --replay", expected="both"))
    if problems:
        raise ConfigError(problems)
    found = certificate(run, replays=replays, trusts=trusts, tell=lambda text: click.echo(text, err=True))
    text, record = "\n".join(page(found)) + "\n", json.dumps(attrs.asdict(found), indent=1) + "\n"
    if output is not None:
        write_atomically(output, text, NAMED_OUTPUT)
        write_atomically(output.with_suffix(".json"), record, NAMED_OUTPUT)
    if as_json:
        click.echo(record, nl=False)
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"{output}: {summary(found)}")
    if any(claim.verdict == "not held" for claim in found.claims):
        click.get_current_context().exit(NOT_HELD)


def _page_problems(output: Path) -> Iterator[Problem]:
    """Yield what keeps a page from being written beside its JSON."""
    record, expected = (
        output.with_suffix(".json") if output.name else output,
        "a file of another suffix than .json, such as certificate.md",
    )
    if not output.name or output.suffix == ".json":
        yield Problem(path="--output", found=str(output), expected=expected)
    elif folders := [path for path in (output, record) if path.is_dir()]:
        yield Problem(path="--output", found=f"{folders[0]}, a folder", expected="the name of a file")


def summary(found: Certificate) -> str:
    """The numbers of claims by verdict."""
    counts = {
        verdict: sum(claim.verdict == verdict for claim in found.claims) for verdict in ("held", "not held", "not recorded")
    }
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def page(found: Certificate) -> Iterator[str]:
    """Yield the lines of the page."""
    yield f"# Certificate of {Path(found.run).name}"
    yield ""
    yield f"rlcore {found.version} judged {found.run}: {summary(found)}."
    yield f"SHA-256 of the inputs: `{found.sha256}`"
    yield ""
    yield "| Claim | Verdict | Figures | Shown by |"
    yield "|---|---|---|---|"
    for claim in found.claims:
        yield f"| {claim.name} | {claim.verdict} | {_cell(claim.text)} | `{_cell(claim.command)}` |"
    yield ""
    yield "## Inputs\n\n`sha256sum` of these files, in this order, gives the lines whose SHA-256 stands above.\n\n```text"
    for name, digest in found.inputs:
        yield f"{digest}  {name}"
    yield "```"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
