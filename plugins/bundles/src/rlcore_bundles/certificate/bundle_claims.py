"""Claims from the bundles of a run: they are whole, their losses are those of float64, and replays repeat them."""

from collections.abc import Callable
from pathlib import Path

from rlcore.reading import parse_toml
from rlcore.spi import CheckpointError, RlcoreError
from rlcore_bundles.certificate.claims import Judgement, held, missing, one_line
from rlcore_bundles.certificate.oracle import loss_in_float64, tolerance
from rlcore_bundles.difference import first_difference
from rlcore_bundles.replay import replay
from rlcore_bundles.replaying import TRUST
from rlcore_bundles.storage import read_bundle

ABSENT = "no bundles/ (logging.bundles_every_n_steps)"
SHOWN = 3


def bundle_folders(run: Path) -> list[Path]:
    """The bundles of a run, by step."""
    return sorted(path for path in (run / "bundles").glob("step-*") if path.is_dir())


def bundles(run: Path) -> Judgement:
    """Every file of every bundle has the size and digest that its header names."""
    found = bundle_folders(run)
    if not found:
        return missing(ABSENT)
    problems = []
    for path in found:
        try:
            read_bundle(path)
        except CheckpointError as error:
            problems.append(one_line(error))
    return held(problems[:SHOWN], f"{len(found)} are whole: {', '.join(path.name for path in found)}")


def losses(run: Path) -> Judgement:
    """The loss of each recorded update is that of float64, from the recorded log-probabilities."""
    folders = bundle_folders(run)
    if not folders:
        return missing(ABSENT)
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
    return _counted(count, problems, reasons, f"{count} updates, at most {worst:.2g} apart")


def replays(run: Path, trusts: bool, tell: Callable[[str], None]) -> Judgement:
    """A replay of each bundle repeats every quantity up to rounding. `trusts`: code of the model is executed, if the recipe
    does."""
    folders = bundle_folders(run)
    if not folders:
        return missing(ABSENT)
    problems, reasons, count = list[str](), list[str](), 0
    for path in folders:
        try:
            bundle = read_bundle(path)
            wanted = trusts and parse_toml(bundle.recipe)["model"].get(TRUST, False)
            rows = replay(bundle, [f"model.{TRUST}=true"] if wanted else [], rewards=False, tell=tell).rows
        except RlcoreError as error:
            reasons.append(f"{path.name}: {one_line(error)}")
            continue
        count += 1
        if (first := first_difference(rows)) is not None:
            problems.append(f"{path.name}: {first.quantity} differs ({first.where})")
    return _counted(count, problems, reasons, f"{count} bundles, nothing differs by more than rounding")


def _counted(count: int, problems: list[str], reasons: list[str], text: str) -> Judgement:
    """The judgement of parts, of which `count` were computed and others were not, for `reasons`."""
    if not count:
        return missing(reasons[0] if reasons else "the bundles hold no update")
    return held(problems[:SHOWN], text + (f"; {len(reasons)} without: {reasons[0]}" if reasons else ""))
