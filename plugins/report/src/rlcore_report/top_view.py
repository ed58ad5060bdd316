"""The terminal view of `rlcore top`: a frame as tables of rich."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlcore.schema.printable import printable
from rlcore_report.status_command import duration, lines_of
from rlcore_report.top import Frame

GIB = 2**30
SILENT_S = 15.0
"""Seconds after which a rank or an engine that writes nothing is marked."""
BAR = 24
"""Characters of the longest bar."""
MAX_TEXT = 60
"""Most characters of a row."""
NO_RANKS = 'memory of ranks: add "rank_status" of rlcore-profiler to observers.names'
NO_ENGINES = "queues of engines: set generator.vllm.metrics = true"


def view(frame: Frame, now: float) -> RenderableType:
    """Return what the terminal shows of a frame at a time in seconds since 1970."""
    head = [Text(printable(line)) for line in (frame.run, *lines_of(frame.state, now))]
    return Group(*head, *(part for part in _parts(frame) if part is not None))


def _parts(frame: Frame) -> Iterator[RenderableType | None]:
    total = sum(frame.phases_s.values())
    yield _table(
        ("phase of the last step", "s", "share", ""),
        (
            (name, f"{seconds:.2f}", f"{seconds / total:.0%}", "█" * round(BAR * seconds / total))
            for name, seconds in frame.phases_s.items()
        ),
    )
    yield _line("tokens/s", {name: f"{value:,.0f}" for name, value in frame.speeds.items()})
    yield _line("queue", {name: f"{value:g}" for name, value in frame.queues.items()})
    yield _line("memory of the device, GiB", {name: f"{value:.2f}" for name, value in frame.memory_gib.items()})
    yield _table(
        ("engine", "running", "waiting", "KV cache", "preemptions", ""),
        (
            (
                name,
                f"{one.get('running', 0):.0f}",
                f"{one.get('waiting', 0):.0f}",
                f"{one.get('kv_cache_share', 0):.0%}",
                f"{one.get('preemptions', 0):.0f}",
                _silence(frame, one["silent_s"]),
            )
            for name, one in frame.engines.items()
        ),
    ) or (Text(NO_ENGINES, style="dim") if frame.generator == "vllm" else None)
    yield _table(("rank", "host", "doing", "memory, GiB", ""), _ranks(frame)) or Text(NO_RANKS, style="dim")
    yield _table(
        ("slowest calls of the last step", "s", "slowest rank", "fastest, s"),
        (
            (f"{call.role} {call.name}", f"{call.seconds:.2f}", str(call.rank), f"{call.fastest_s:.2f}")
            for call in frame.slow_calls
        ),
    )
    yield _table(
        ("slowest calls of the environment", "s", "episode"),
        ((one["function"], f"{one['seconds']:.2f}", _short(one["episode"])) for one in frame.slow_episodes),
    )
    yield _table(("failures", "episodes"), ((kind, str(number)) for kind, number in frame.failures.items()))
    yield _table(("rows with most failures", "episodes"), ((_short(row), str(n)) for row, n in frame.failed_rows.items()))
    restarts = {"engines": str(frame.engine_restarts)}
    yield _line("restarts", restarts | ({"workers": str(frame.worker_starts - 1)} if frame.worker_starts else {}))


def _ranks(frame: Frame) -> Iterator[Sequence[str]]:
    for rank in frame.ranks:
        used = rank.memory_bytes
        on_device = f"{used['device_used'] / GIB:.1f} of {used['device_total'] / GIB:.1f}" if "device_used" in used else ""
        memory = f"{on_device}, torch {used['reserved'] / GIB:.1f}" if on_device else f"host {used['resident'] / GIB:.2f}"
        silent_s = rank.silent_s if frame.state.state == "running" else 0.0
        doing = rank.hook if rank.hook_s is None else f"{rank.hook} for {duration(rank.hook_s + silent_s)}"
        yield str(rank.rank), rank.host, doing, memory, _silence(frame, rank.silent_s)


def _silence(frame: Frame, seconds: float) -> str:
    is_late = frame.state.state == "running" and seconds > SILENT_S
    return f"silent for {duration(seconds)}" if is_late else ""


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= MAX_TEXT else f"{shown[: MAX_TEXT - 1]}…"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType | None:
    """Return a table; None without rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(head):
        table.add_column(title, justify="left" if number == 0 or not title else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table if table.row_count else None


def _line(title: str, values: dict[str, str]) -> RenderableType | None:
    if not values:
        return None
    return Text.assemble((f"{title}  ", "bold"), "   ".join(f"{name} {value}" for name, value in values.items()))
