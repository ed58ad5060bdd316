"""Claims from the folder `receipts/` of a run: refits, versions of tokens, and receipts."""

from pathlib import Path
from typing import Any

from rlcore.reading import read_json
from rlcore_bundles.certificate.claims import Judgement, held, missing
from rlcore_bundles.certificate.run_claims import recipe_of, trained_steps
from rlcore_bundles.header import HEADER
from rlcore_bundles.receipts.observer import is_drawn
from rlcore_bundles.receipts.record import REFITS, STEPS, described_refit, read_lines

FOLDER = "receipts"
ABSENT = "the run has no [receipts]"
SHOWN = 3


def receipts_of(run: Path) -> list[dict[str, Any]]:
    """The receipts of a run, by step."""
    return [read_json(path) for path in sorted((run / FOLDER).glob("step-*.json"))]


def refits(run: Path) -> Judgement:
    """The generator acknowledged each refit, a version has one set of digests, and each version that sampled has its refit."""
    lines = list(read_lines(run / FOLDER / REFITS))
    if not lines:
        return missing(ABSENT if not (run / FOLDER).is_dir() else "nothing generates")
    by_version: dict[int, set[tuple[int, str]]] = {}
    for line in lines:
        by_version.setdefault(int(line["version"]), set()).add((int(line["num_tensors"]), str(line["sha256"])))
    problems = [
        f"version {version} was sent with {len(of)} different digests"
        for version, of in by_version.items()
        if len({num for num, _ in of}) < len(of)
    ]
    sampled = {int(version) for line in read_lines(run / FOLDER / STEPS) for version in line["versions"]}
    problems += [
        f"version {version} sampled tokens, and no refit brought it" for version in sorted(sampled - by_version.keys())
    ]
    problems += _against_bundles(run, by_version)
    unnamed = sum(not num for of in by_version.values() for num, _ in of)
    tensors = max(num for of in by_version.values() for num, _ in of)
    text = f"{len(lines)} refits of {len(by_version)} versions, of at most {tensors} tensors; the generator acknowledged each"
    if unnamed:
        text += f"; {unnamed} by shards, whose digests the ranks compared"
    return held(problems[:SHOWN], text)


def _against_bundles(run: Path, by_version: dict[int, set[tuple[int, str]]]) -> list[str]:
    """The bundles whose digests are other ones than the refit's."""
    wrong = []
    for path in sorted((run / "bundles").glob(f"step-*/{HEADER}")):
        header = read_json(path)
        digests, version = header["digests"]["before"], int(header["weight_version"])
        line = described_refit(version, digests)
        if digests and version in by_version and (line["num_tensors"], line["sha256"]) not in by_version[version]:
            wrong.append(f"{path.parent.name} holds other digests of version {version} than the refit")
    return wrong


def token_versions(run: Path) -> Judgement:
    """Every loss token of every step was sampled by weights that the recipe's staleness allows."""
    lines = {int(line["step"]): line for line in read_lines(run / FOLDER / STEPS)}
    if not lines:
        return missing(ABSENT)
    if not any(line["versions"] for line in lines.values()):
        return missing("no policy sampled the tokens")
    recipe = recipe_of(run)
    training = recipe["training"]
    updates = int(training["minibatches_per_step"]) * int(training.get("epochs_per_step", 1))
    oldest = int(recipe["async"]["max_staleness"]) * updates
    problems, total, stale = [], 0, 0
    for step, line in lines.items():
        now, counts = int(line["weight_version"]), {int(version): int(count) for version, count in line["versions"].items()}
        total += sum(counts.values())
        stale += sum(count for version, count in counts.items() if version < now)
        if sum(counts.values()) != int(line["num_tokens"]):
            problems.append(f"step {step}: {line['num_tokens']} tokens, and {sum(counts.values())} with a version")
        problems += [
            f"step {step}: {count} tokens of version {version}, at version {now}"
            for version, count in counts.items()
            if not max(0, now - oldest) <= version <= now
        ]
    done = {int(line["step"]) for line in trained_steps(run)}
    text = f"{total:,} tokens of {len(lines)} steps, {stale:,} of them by older weights; at most {oldest} updates behind"
    if not problems and (lacking := sorted(done - lines.keys())):
        return missing(f"{text}; nothing of {len(lacking)} steps, the first {lacking[0]}")
    return held(problems[:SHOWN], text)


def receipts(run: Path) -> Judgement:
    """The receipts of the steps that the seed drew, and the worst of their differences."""
    recipe = recipe_of(run)
    options = recipe.get(FOLDER)
    if options is None or not options["every_n_steps"]:
        return missing(ABSENT)
    done = {int(line["step"]) for line in trained_steps(run)}
    drawn = {step for step in done if is_drawn(int(recipe["run"]["seed"]), step, int(options["every_n_steps"]))}
    found = {int(one["step"]): one for one in receipts_of(run)}
    failed = {step: one["failure"] for step, one in found.items() if "failure" in one}
    whole = {step: one for step, one in found.items() if step not in failed}
    problems = [f"step {step}: {one['finding']}" for step, one in whole.items() if one["finding"]]
    problems += [f"step {step} failed: {reason}" for step, reason in failed.items()]
    lacking = sorted(drawn - found.keys())
    if not whole and not problems:
        return missing(f"{len(drawn)} steps were drawn, and none has a receipt")
    parts = [f"{len(whole)} of {len(drawn)} drawn steps"]
    if lacking:
        parts.append(f"none of step {', '.join(map(str, lacking[:SHOWN]))}{'…' if len(lacking) > SHOWN else ''}")
    for part in ("trainer", "generation"):
        if of := [one[part] for one in whole.values() if one[part] is not None]:
            mean, greatest = max(one["mean"] for one in of), max(one["greatest"] for one in of)
            tokens = sum(one["num_tokens"] for one in of)
            parts.append(f"{part}: {tokens:,} tokens, worst mean {mean:.3g}, greatest {greatest:.3g}")
    if compared := [one["tensors"]["compared"] for one in whole.values() if one["tensors"] is not None]:
        parts.append(f"digests of {sum(compared):,} tensors of refits equal those of the trainer's weights")
    return held(problems[:SHOWN], "; ".join(parts))
