"""Claims about a run as a whole: its recipe, versions, model, metrics, checkpoints and failures."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from rlcore.reading import parse_toml, read_bytes
from rlcore.run.storage.checkpoint import find_damage, list_checkpoints, read_loop_state
from rlcore.run.storage.recipe_changes import earlier_recipes
from rlcore.run.storage.run_directory import RunDirectory
from rlcore_bundles.certificate.claims import Judgement, held, missing
from rlcore_bundles.file_digests import sha256_of
from rlcore_bundles.receipts.record import read_lines

METRIC = "token_mult_prob_error"
FAILURES = "failures.jsonl"
EVALUATED = "evaluated"
"""Outcome of episodes that nothing trains on."""
"""The ledger of failures. A line is a step with `entries`: `episodes` that ended by one `kind`, with `outcome` and `weight`.
The weight sums |advantage| over loss tokens."""
POLICY = "policy"
"""The kind of episodes that nothing but the policy ended."""


def recipe_of(run: Path) -> dict[str, Any]:
    """The recipe as it ran."""
    return parse_toml(read_bytes(run / "recipe.toml").decode())


def trained_steps(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl that a step's end wrote."""
    return [line for line in RunDirectory(path=run).read_metrics() if "time/total_s" in line]


def recipe(run: Path) -> Judgement:
    """The recipe's digest, and whether it changed when the run was resumed."""
    recipe_of(run)
    digest = sha256_of(run / "recipe.toml")
    changed = len(earlier_recipes(run))
    text = f"SHA-256 {digest}" + (f"; changed {changed} times when the run was resumed" if changed else "; it never changed")
    return held([], text)


def versions(run: Path) -> Judgement:
    """The versions of what ran."""
    found = RunDirectory(path=run).versions
    if not found:
        return missing("no environment.json")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    return held([], text)


def model(run: Path) -> Judgement:
    """The digest of the model that the run began with, as its newest checkpoint has it."""
    checkpoints = list_checkpoints(RunDirectory(path=run).checkpoints)
    path = recipe_of(run)["model"]["path"]
    if not checkpoints:
        return missing(f"{path}; no checkpoint holds its digest")
    return held([], f"{path}, digest {read_loop_state(checkpoints[-1]).model}")


def metrics(run: Path) -> Judgement:
    """Every step has its line of metrics, and every figure is finite."""
    steps = trained_steps(run)
    if not steps:
        return missing("no step in metrics.jsonl")
    planned, numbers = int(recipe_of(run)["run"]["num_steps"]), {int(line["step"]) for line in steps}
    lost = sorted(set(range(1, max(numbers) + 1)) - numbers)
    infinite = [
        f"{name} of step {line['step']} is {value}"
        for line in steps
        for name, value in line.items()
        if not math.isfinite(value)
    ]
    problems = [*([f"no line of the steps {_list(lost)}"] if lost else []), *infinite[:3]]
    return held(problems, f"{len(steps)} of {planned} steps, every figure finite")


def mismatch(run: Path) -> Judgement:
    """Generator and trainer agree on the tokens of each step within the recipe's bound."""
    found = {int(line["step"]): line[METRIC] for line in RunDirectory(path=run).read_metrics() if METRIC in line}
    if not found:
        return missing(f"no {METRIC} in metrics.jsonl")
    bound = float(recipe_of(run)["training"][f"max_{METRIC}"])
    worst = max(found, key=found.__getitem__)
    beyond = [f"{METRIC} of step {step} is {value:.6g}, above {bound:g}" for step, value in found.items() if not value <= bound]
    text = f"{METRIC} of {len(found)} steps, at most {found[worst]:.6g} in step {worst}; the bound is {bound:g}"
    return held(beyond[:3], text)


def checkpoints(run: Path) -> Judgement:
    """The files of every checkpoint have the sizes and digests of its manifest."""
    found = list_checkpoints(RunDirectory(path=run).checkpoints)
    if not found:
        return missing("none is there")
    damaged = [f"{path.name}: {damage}" for path in found if (damage := find_damage(path))]
    return held(damaged, f"{len(found)} are whole: {', '.join(path.name for path in found)}")


def failures(run: Path) -> Judgement:
    """The failures of the run, and what they moved."""
    if not (run / FAILURES).is_file():
        return missing(f"no {FAILURES}")
    every = [entry for line in read_lines(run / FAILURES) for entry in line["entries"]]
    entries = [entry for entry in every if entry["outcome"] != EVALUATED]
    kinds, total, moved = Counter[str](), 0.0, 0.0
    for entry in entries:
        kinds[str(entry["kind"])] += int(entry["episodes"])
        if entry["outcome"] == "trained":
            total += entry["weight"] or 0.0
            moved += 0.0 if entry["kind"] == POLICY else entry["weight"] or 0.0
    of_others = [f"{count:,} by {kind}" for kind, count in sorted(kinds.items()) if kind != POLICY]
    text = f"{kinds.total():,} episodes, {', '.join(of_others) or 'none of which failed'}"
    share = f"; {100 * moved / total:.3g} % of the advantages trained on are theirs" if total and of_others else ""
    return held([], text + share)


def _list(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
