"""`rlcore verify`: the conformance kit on an installed plugin."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, frozen

from rlcore.gpu import detect_device
from rlcore.published_plugins import how_to_install
from rlcore.registry.discovery import Entry, Registry, discover
from rlcore.registry.selection import select
from rlcore.schema.problem import Problem
from rlcore.spi.errors import ConfigError, PluginError, WorkerError
from rlcore.spi.provider import ROLES, Role
from rlcore_workers.descendants import supervised

if TYPE_CHECKING:
    from rich.table import Table

FAILED = 1
MAX_LINES = 12
"""Most lines of a failure that are shown."""
_MODULE = "rlcore_conformance.cli.verify"
_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}
_ORDER = tuple(_STYLES)


@frozen(kw_only=True)
class Check:
    """The outcome of one check, over all its cases."""

    name: str
    says: str
    """The check in a sentence."""
    outcome: str
    """passed; failed where a case of it has failed; skipped where all were."""
    num_cases: int
    reason: str
    seconds: float


@click.command("verify")
@click.argument("name")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--role", type=click.Choice(ROLES), help="Which one, where plugins of several roles have the name.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="cpu", show_default=True, help="Of trainers and generators."
)
@click.option("--row", help="A row as JSON, for an environment that brings none.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def verify_command(
    context: click.Context,
    name: str,
    overrides: tuple[str, ...],
    role: Role | None,
    device: str,
    row: str | None,
    as_json: bool,
) -> None:
    """Run the conformance kit on an installed plugin.

    KEY=VALUE are keys of the plugin's section, such as `num_train=10`. A trainer of several ranks is run on two as well. The
    exit code is 0 where no check has failed, else 1.
    """
    entry = find(discover(), name, role)
    kind = detect_device() if device == "auto" else device
    job = {
        "role": entry.role,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "options": options_of(entry, overrides),
        "device": kind,
        "row": _row(row),
    }
    checks = summed_up(_results(job, shows=not as_json))
    if as_json:
        plugin = {key: job[key] for key in ("role", "name", "distribution", "version", "device")}
        click.echo(json.dumps({**plugin, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _show(entry, checks)
    context.exit(FAILED if any(check.outcome == "failed" for check in checks) else 0)


def find(registry: Registry, name: str, role: Role | None) -> Entry:
    """The installed plugin of a name; PluginError where there is none, where roles share it, or where it cannot be used."""
    installed = {each: [entry.name for entry in registry.of(each)] for each in ROLES if role in (None, each)}
    roles = [each for each, names in installed.items() if name in names]
    if len(roles) > 1:
        raise PluginError(f"found plugins {name!r} of the roles {', '.join(roles)}; say which with --role")
    if not roles:
        known = {each for names in installed.values() for each in names}
        shown = ", ".join(sorted(known)) or "none"
        hints = filter(None, (how_to_install(each, name, names) for each, names in installed.items()))
        hint = min(hints, key=lambda hint: hint.startswith("Did you mean"), default="")  # the name itself before one like it
        raise PluginError(
            f"found no {role or 'plugin'} {name!r}; expected one that is installed: {shown}. {hint}".removesuffix(". ")
        )
    return select(registry, roles[0], name, device="cpu", needs={})


def options_of(entry: Entry, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of the plugin's section that KEY=VALUE set; ConfigError names every one that does not fit."""
    from rlcore.config.load import raw_from
    from rlcore.schema.structure import structure

    values = dict(raw_from({}, overrides).values)
    assert entry.provider is not None
    _, problems = structure(values, entry.provider.config, f"{entry.role}.{entry.name}")
    if problems:
        raise ConfigError(problems)
    return values


def summed_up(results: Iterator[dict[str, Any]]) -> list[Check]:
    """One line a check, in the order in which they ran."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        cases.setdefault(result["check"], []).append(result)
    return [_check(name, each) for name, each in cases.items()]


def _check(name: str, cases: Sequence[dict[str, Any]]) -> Check:
    outcomes = {case["outcome"] for case in cases}
    outcome = next(each for each in ("failed", "passed", "skipped") if each in outcomes)
    told = [case for case in cases if case["outcome"] == outcome]
    reasons = dict.fromkeys(case["reason"] for case in told if case["reason"])
    return Check(
        name=name,
        says=cases[0]["says"],
        outcome=outcome,
        num_cases=len(cases),
        reason="\n".join(reasons),
        seconds=sum(case["seconds"] for case in cases),
    )


def _results(job: dict[str, Any], *, shows: bool) -> Iterator[dict[str, Any]]:
    """Yield the reports of the checks' process as they arrive. WorkerError where the process ends too early."""
    from rich.console import Console

    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = supervised([sys.executable, "-m", _MODULE, json.dumps(job)])
    console = Console(stderr=True, quiet=not shows)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8", env=environment) as process,
        console.status(f"{job['role']} {job['name']}: starting") as status,
    ):
        assert process.stdout is not None
        is_done = False
        try:
            for line in process.stdout:
                result = json.loads(line)
                if is_done := "done" in result:
                    break
                status.update(f"{job['role']} {job['name']}: {result['case']} {result['outcome']}")
                yield result
            code = process.wait()
        finally:
            process.terminate()
        if code not in (0, 1) or not is_done:  # 1 is both a check that failed, for pytest, and an error, for Python
            log.seek(0)
            last = "".join(log.readlines()[-MAX_LINES:])
            raise WorkerError(f"the kit's process ended with code {code} before it was done. Its last lines:\n{last}")


def _show(entry: Entry, checks: Sequence[Check]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=160)
    console.print(f"{entry.role} {entry.name} ({entry.origin})", highlight=False, markup=False)
    console.print(_table(checks))
    for check in checks:
        if check.outcome == "failed":
            console.print(f"\n{check.name}", style="bold red", highlight=False)
            for line in check.reason.splitlines()[:MAX_LINES]:
                console.print(f"  {line}", markup=False, highlight=False)
    counts = [f"{sum(check.outcome == outcome for check in checks)} {outcome}" for outcome in _ORDER]
    console.print(f"{', '.join(counts)} in {sum(check.seconds for check in checks):.1f} s", highlight=False)


def _table(checks: Sequence[Check]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("check", overflow="fold")
    table.add_column("outcome")
    table.add_column("cases", justify="right")
    table.add_column("s", justify="right")
    table.add_column("what was checked, or why not", overflow="fold")
    for check in checks:
        why = check.reason if check.outcome == "skipped" else check.says
        name = check.name.removeprefix("test_").replace("_", " ")
        outcome = Text(check.outcome, style=_STYLES[check.outcome])
        table.add_row(Text(name), outcome, str(check.num_cases), f"{check.seconds:.1f}", Text(why))
    return table


def _row(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        row = json.loads(text)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ConfigError([Problem(path="--row", found=repr(text), expected='an object in JSON, such as {"prompt": "1+1="}')])
    return row
