"""Claims from the bundles of a run: they are whole, their losses are those of float64, and replays repeat them."""

from collections.abc import Callable
from pathlib import Path

from rlcore.spi import CheckpointError, RlcoreError
from rlcore_bundles.certificate.claims import Claim, held, missing, one_line
from rlcore_bundles.certificate.oracle import loss_in_float64, tolerance
from rlcore_bundles.difference import first_difference
from rlcore_bundles.replay import replay
from rlcore_bundles.storage import read_bundle

ABSENT = "no bundles/ (logging.bundles_every_n_steps)"
SHOWN = 3


def bundle_folders(run: Path) -> list[Path]:
    """The bundles of a run, by step."""
    return sorted(path for path in (run / "bundles").glob("step-*") if path.is_dir())


def bundles(run: Path) -> Claim:
    """Every file of every bundle has the size and digest that its header names."""
    name, command = "bundles", f"ls {run}/bundles"
    found = bundle_folders(run)
    if not found:
        return missing(name, ABSENT, command)
    problems = []
    for path in found:
        try:
            read_bundle(path)
        except CheckpointError as error:
            problems.append(one_line(error))
    return held(name, problems[:SHOWN], f"{len(found)} are whole: {', '.join(path.name for path in found)}", command)


def losses(run: Path) -> Claim:
    """The loss of each recorded update is that of float64, from the recorded log-probabilities."""
    name, command = "losses in float64", f"rlcore certify {run} --json"
    folders = bundle_folders(run)
    if not folders:
        return missing(name, ABSENT, command)
    problems, reasons, count, worst = list[str](), list[str](), 0, 0.0
    for path in folders:
        bundle = read_bundle(path)
        for number, update in enumerate(bundle.updates):
            found = loss_in_float64(bundle, number)
            where = f"update {number + 1} of {path.name}"
            if isinstance(found, str):
                reasons.append(f"{where}: {found}")
                continue
            count += 1
            away = abs(found - update.loss_value)
            worst = max(worst, away)
            if not away <= tolerance(bundle):
                problems.append(f"{where}: recorded {update.loss_value:.9g}, {found:.9g} in float64")
    if not count:
        return missing(name, reasons[0] if reasons else "the bundles hold no update", command)
    text = f"{count} updates, at most {worst:.2g} apart" + (f"; {len(reasons)} without: {reasons[0]}" if reasons else "")
    return held(name, problems[:SHOWN], text, command)


def replays(run: Path, tell: Callable[[str], None]) -> Claim:
    """A replay of each bundle repeats every quantity up to rounding."""
    name, folders = "replays", bundle_folders(run)
    command = f"rlcore replay {folders[0] if folders else run / 'bundles'}"
    if not folders:
        return missing(name, ABSENT, command)
    problems, reasons, count = list[str](), list[str](), 0
    for path in folders:
        try:
            rows = replay(read_bundle(path), rewards=False, tell=tell).rows
        except RlcoreError as error:
            reasons.append(f"{path.name}: {one_line(error)}")
            continue
        count += 1
        if (first := first_difference(rows)) is not None:
            problems.append(f"{path.name}: {first.quantity} differs ({first.where})")
    if not count:
        return missing(name, reasons[0], command)
    text = f"{count} bundles, nothing differs by more than rounding" + (
        f"; {len(reasons)} without: {reasons[0]}" if reasons else ""
    )
    return held(name, problems[:SHOWN], text, command)
