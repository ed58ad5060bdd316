"""The command that tries an engine's families in child processes."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from attrs import evolve

from rlcore import spi
from rlcore_torchkit.testing.families.children import ChildError, in_child
from rlcore_torchkit.testing.families.engine import Family, TriedEngine
from rlcore_torchkit.testing.families.engine_outcome import EngineOutcome
from rlcore_torchkit.testing.families.engine_table import summary, written


def main(kind: type[TriedEngine], arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 where no family is wrong, crashes or is left out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {kind.command}",
        description="Refit and sample from a tiny model of each family; compare with transformers.",
    )
    parser.add_argument("--families", metavar="A,B,C", help="model_types to try; by default all that transformers and it have")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="families at the same time (default 1)")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help="seconds for a family (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file, anew after each family")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="take outcomes from files of --json, later ones first"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose table of the device is replaced")
    options = parser.parse_args(arguments)
    if options.read:
        record = _read(options.read)
    else:
        engine = kind(_device(options.device))
        known = engine.families()
        names = options.families.split(",") if options.families else sorted(known)
        if unknown := sorted(set(names) - known.keys()):
            parser.error(f"transformers and {kind.name} have no family {', '.join(unknown)} in common")
        record = {"device": engine.device, "versions": engine.versions(), "date": f"{datetime.now(tz=UTC):%Y-%m-%d}"}
        record["outcomes"] = []
        for outcome in _tried(engine, [known[name] for name in names], options):
            print(outcome.line, file=sys.stderr, flush=True)
            record["outcomes"].append(outcome.content())
            if options.json is not None:
                options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    outcomes = [EngineOutcome(**content) for content in record["outcomes"]]
    print(summary(outcomes))
    if options.write is not None:
        page, head = options.write.read_text(encoding="utf-8"), f"{record['versions']}, {record['date']}"
        options.write.write_text(written(page, outcomes, head, kind.command, record["device"]), encoding="utf-8")
    return 0 if all(outcome.is_sound for outcome in outcomes) else 1


def _device(name: str) -> Any:
    from rlcore.gpu import has_gpu

    return name if name != "auto" else "cuda" if has_gpu() else "cpu"


def _read(files: Sequence[Path]) -> dict[str, Any]:
    """Return what files of one device and the same versions hold together; of a family, the outcome of the last file."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    kinds = {(record["device"], record["versions"]) for record in records}
    if len(kinds) > 1:
        raise ValueError(f"found outcomes of {sorted(kinds)}; expected one device and its versions")
    outcomes = {content["model_type"]: content for record in records for content in record["outcomes"]}
    return {**records[-1], "outcomes": list(outcomes.values())}


def _tried(engine: TriedEngine, families: Sequence[Family], options: argparse.Namespace) -> Iterator[EngineOutcome]:
    """Yield the outcomes in the order of the families."""
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        yield from pool.map(partial(_in_children, engine, time_limit=options.time_limit), families)


def _in_children(engine: TriedEngine, family: Family, time_limit: float) -> EngineOutcome:
    """Try a family in float32, and in bfloat16 where the engine has no kernels for float32."""
    outcome = _in_child(engine, family, "float32", time_limit)
    if outcome.verdict != "cannot":
        return outcome
    other = _in_child(engine, family, "bfloat16", time_limit)
    return outcome if other.verdict == "cannot" else other


def _in_child(engine: TriedEngine, family: Family, dtype: spi.DtypeName, time_limit: float) -> EngineOutcome:
    begun = monotonic()
    start: Any = "spawn" if engine.device == "cuda" else "forkserver"
    try:
        outcome: EngineOutcome = in_child(_try, (engine, family, dtype), time_limit, preloaded=engine.preloaded, start=start)
    except ChildError as error:
        outcome = EngineOutcome(
            model_type=family.model_type,
            implementation=family.implementation,
            verdict="crashed",
            reason=str(error),
            dtype=dtype,
        )
    return evolve(outcome, seconds=round(monotonic() - begun, 1))


def _try(engine: TriedEngine, family: Family, dtype: spi.DtypeName) -> EngineOutcome:
    engine.prepare_child()
    from rlcore_torchkit.testing.families.engine_trial import try_family

    with tempfile.TemporaryDirectory() as directory:
        return try_family(engine, family, dtype, Path(directory))
