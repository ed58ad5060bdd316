"""Count the recipes of other libraries that import and pass `check`: import_counts.py --nemo-rl CHECKOUT --verl CHECKOUT

A recipe of NeMo-RL is a YAML file below examples with a policy and the table of an algorithm. A recipe of verl is the arguments
with which a script below examples starts `verl.trainer.main_ppo`; a restricted bash prints them and runs no program.
Each recipe is imported, or refused with the reason. An imported recipe passes where `check` reports only what the machine
lacks: the model's files, NeMo Gym's servers, 8-bit products. With --write the counts replace those in docs/importing.md.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import field, frozen

from rlcore.run.plan.prepare import prepare
from rlcore.spi import ConfigError, RlcoreError
from rlcore_import import nemo_rl, verl
from rlcore_import.command import recipe_text
from rlcore_import.recipe import ImportedRecipe
from rlcore_import.source import UNKNOWN
from rlcore_import.yaml_files import read_inherited

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "importing.md"
BEGIN, END = "<!-- counts: release/import_counts.py -->\n", "<!-- end of counts -->"
OF_MACHINES = (
    "with a vLLM that was built for cpu",
    "with no TransformerEngine",
    "TransformerEngine is not installed",
    "lacks the capability 'routed_experts'",
    "expected a model directory, or a name on the Hub",
    "has no list of servers",
    "a JSONL file of NeMo Gym",
)
"""Parts of problems that concern the machine on which `check` runs, the model's files, or servers."""
SCRIPTS_NEED = "verl.trainer.main_ppo"
PRELUDE = r"""
command_not_found_handle() { [[ "$*" == *verl.trainer.main_ppo* ]] && printf '\036%s' "" && printf '%s\037' "$@"; return 0; }
tee() { mapfile -d '' given; printf '%s' "${given[@]}"; }
cd() { :; }; source() { :; }; exec() { "$@"; }; ulimit() { :; }; trap() { :; }
"""
"""Bash functions in place of all programs; one prints the arguments of the training."""
CONFIGS = Path("verl") / "trainer" / "config"


@frozen(kw_only=True)
class Case:
    """A recipe of a checkout."""

    name: str
    file: Path
    overrides: tuple[str, ...] = ()


@frozen(kw_only=True, eq=False)
class Counts:
    """Counts of a checkout's recipes."""

    library: str
    commit: str
    recipes: int
    passed: int = 0
    refused: Counter[str] = field(factory=Counter)
    """Number of refused recipes by reason."""
    wrong: dict[str, str] = field(factory=dict)
    """The problems that `check` finds, by recipe."""
    unrewarded: int = 0
    unknown: Counter[str] = field(factory=Counter)
    """Number of recipes by unknown key."""

    @property
    def imported(self) -> int:
        return self.recipes - self.refused.total()

    def row(self) -> str:
        """Return the row of the table in docs/importing.md."""
        cells = (self.commit, self.recipes, self.imported, self.passed, self.unrewarded, len(self.unknown))
        return f"| {self.library} | {' | '.join(map(str, cells))} |"


def nemo_cases(checkout: Path) -> Iterator[Case]:
    """Yield the recipes of a NeMo-RL checkout."""
    root = checkout / "examples"
    for file in sorted(root.rglob("*.yaml")):
        try:
            tables = read_inherited(file)
        except RlcoreError:
            continue  # no recipe by itself
        if "policy" in tables and any(kind in tables for kind in (*nemo_rl.KINDS, *nemo_rl.OTHERS)):
            yield Case(name=str(file.relative_to(root)), file=file)


def verl_cases(checkout: Path) -> Iterator[Case]:
    """Yield the trainings that the scripts of a verl checkout start."""
    root = checkout / "examples"
    for script in sorted(root.rglob("*.sh")):
        if SCRIPTS_NEED not in script.read_text(encoding="utf-8"):
            continue
        for number, words in enumerate(trainings(script)):
            arguments = words[words.index(SCRIPTS_NEED) + 1 :]
            name = next((word.partition("=")[2] for word in arguments if word.startswith("--config-name")), "ppo_trainer")
            overrides = tuple(word for word in arguments if re.match(r"[~+]{0,2}[\w@/.]+=|~[\w@/.]+$", word))
            yield Case(
                name=f"{script.relative_to(root)}{f' ({number + 1})' if number else ''}",
                file=checkout / CONFIGS / f"{name.removesuffix('.yaml')}.yaml",
                overrides=overrides,
            )


def trainings(script: Path) -> list[list[str]]:
    """Return the arguments of each training that a script starts, expanded by bash. A required variable is `/data`."""
    given: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        prelude, copy = Path(scratch) / "prelude.sh", Path(scratch) / script.name
        prelude.write_text(PRELUDE)
        copy.write_text(re.sub(r"[12&]?>\s*/dev/null", "", script.read_text(encoding="utf-8")))
        while True:
            run = subprocess.run(
                ["/bin/bash", "--restricted", copy],
                env={"BASH_ENV": str(prelude), "PATH": scratch, "HOME": "/root", "LC_ALL": "C.UTF-8", **given},
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
            parts = [part.split("\037")[:-1] for part in run.stdout.split("\036")[1:]]
            needed = re.search(r"line \d+: (\w+): ", run.stderr)
            if parts or needed is None or needed[1] in given:
                return [words for words in parts if SCRIPTS_NEED in words]
            given[needed[1]] = "/data"


def counted(library: str, checkout: Path, scratch: Path) -> Counts:
    """Import a checkout's recipes and check the results."""
    read, cases_of = LIBRARIES[library]
    cases = list(cases_of(checkout))
    counts = Counts(library=library, commit=commit_of(checkout), recipes=len(cases))
    passed = unrewarded = 0
    for case in cases:
        try:
            found = read(case.file, case.overrides)
        except ConfigError as error:
            counts.refused[_reason(error)] += 1
            continue
        counts.unknown.update({one.key for one in found.unmapped if one.why == UNKNOWN})
        unrewarded += found.values.get("environment.name") == "unrewarded" and found.values["algorithm.name"] != "distill"
        problem = problem_of(found, case.name, scratch)
        passed += not problem
        if problem:
            counts.wrong[case.name] = problem
    return Counts(
        library=library,
        commit=counts.commit,
        recipes=len(cases),
        passed=passed,
        refused=counts.refused,
        wrong=counts.wrong,
        unrewarded=unrewarded,
        unknown=counts.unknown,
    )


def problem_of(found: ImportedRecipe, name: str, scratch: Path) -> str:
    """Return the problems that `check` finds in an imported recipe; an empty text for none."""
    recipe = scratch / "recipe.toml"
    recipe.write_text(recipe_text(found, name), encoding="utf-8")
    try:
        prepare(recipe)
    except RlcoreError as error:
        problems = [str(one) for one in getattr(error, "problems", [error])]
        return "; ".join(" ".join(one.split()) for one in problems if not any(words in one for words in OF_MACHINES))
    return ""


def _reason(error: ConfigError) -> str:
    """Return the key and the expected value, without the file."""
    first = error.problems[0]
    if "/" in first.path:
        return f"{first.found}: {first.remedy or first.expected}"
    return f"{first.path}: expected {first.expected}"


def commit_of(checkout: Path) -> str:
    """Return the checkout's commit, from its file COMMIT or from git."""
    named = checkout / "COMMIT"
    if named.is_file():
        return named.read_text().strip()[:7]
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


LIBRARIES: dict[str, tuple[Callable[[Path, Sequence[str]], ImportedRecipe], Callable[[Path], Iterator[Case]]]] = {
    "NeMo-RL": (nemo_rl.import_recipe, nemo_cases),
    "verl": (verl.import_recipe, verl_cases),
}


def table(found: Sequence[Counts], date: str) -> str:
    """Return the counts as docs/importing.md has them."""
    head = "| Library | Commit | Recipes | Imported | Pass `check` | Without rewards | Keys nobody listed |"
    refused = [f"- {one.library}, {number}: {reason}." for one in found for reason, number in one.refused.most_common()]
    lines = [f"Counted on {date}:", "", head, "|---|---|---|---|---|---|---|", *(one.row() for one in found)]
    return "\n".join([*lines, "", "Refused, with the reason:", "", *(refused or ["- none."]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for library in LIBRARIES:
        parser.add_argument(f"--{library.lower()}", type=Path, metavar="CHECKOUT", dest=library)
    parser.add_argument("--write", action="store_true", help="replace the counts in docs/importing.md")
    arguments = vars(parser.parse_args())
    checkouts = {library: arguments[library] for library in LIBRARIES if arguments[library]}
    if not checkouts:
        parser.error("name a checkout: --nemo-rl CHECKOUT or --verl CHECKOUT")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        found = [counted(library, checkout, Path(scratch)) for library, checkout in checkouts.items()]
    for one in found:
        if not one.recipes:
            sys.exit(f"found no recipes of {one.library} in {checkouts[one.library]}; expected the root of a checkout")
        for name, problem in one.wrong.items():
            print(f"{one.library} {name}: {problem}", file=sys.stderr)
        for key, number in sorted(one.unknown.items()):
            print(f"{one.library} {key}: nobody listed it, in {number} recipe(s)", file=sys.stderr)
    text = table(found, f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}")
    print(text)
    if arguments["write"]:
        document = DOCUMENT.read_text(encoding="utf-8")
        before, rest = document.split(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
