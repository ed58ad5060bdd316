"""How many of another library's recipes import and pass `check`: python benchmarks/import_coverage.py CHECKOUT

    git clone https://github.com/NVIDIA-NeMo/RL && python benchmarks/import_coverage.py RL
    git clone https://github.com/volcengine/verl && python benchmarks/import_coverage.py --library verl verl

Of NeMo-RL it takes every YAML file below examples/configs whose name begins with grpo, sft or dpo; of verl the KEY=VALUE
arguments of every script below examples that starts `verl.trainer.main_ppo`. A recipe passes where it is read, each key has its
type and range, and no plugin finds anything wrong with it but what this machine lacks; the model is on the Hub, so that nothing
is said of its files.
"""

import argparse
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from rlcore.cli.import_recipe import recipe_text
from rlcore.run.plan.prepare import prepare
from rlcore.spi import RlcoreError
from rlcore_import import nemo_rl, verl
from rlcore_import.yaml_files import read_inherited

NOT_RECIPES = ("evals", "tutorials")
NOT_OF_RECIPES = (
    "with a vLLM that was built for cpu",
    "with no TransformerEngine",
    "TransformerEngine is not installed",
    "lacks the capability 'routed_experts'",
    "expected a model directory, or a name on the Hub",
)
"""What problems say that are of the machine on which this runs, whose vLLM may be one for CPUs, or of the model's files."""
PPO_CONFIG = "verl/trainer/config/ppo_trainer.yaml"
MEGATRON_CONFIG = "verl/trainer/config/ppo_megatron_trainer.yaml"


@frozen(kw_only=True)
class Case:
    """A recipe of the checkout."""

    name: str
    kind: str
    file: Path
    overrides: tuple[str, ...] = ()


def nemo_cases(checkout: Path) -> Iterator[Case]:
    """The GRPO, SFT and DPO recipes of NeMo-RL."""
    root = checkout / "examples" / "configs"
    for file in sorted(root.rglob("*.yaml")):
        relative = file.relative_to(root)
        kind = file.name.split("-")[0].split("_")[0].split(".")[0]
        if not set(relative.parts) & set(NOT_RECIPES) and kind in nemo_rl.KINDS and _is_policy(file):
            yield Case(name=str(relative), kind=kind, file=file)


def _is_policy(file: Path) -> bool:
    """Whether a file is a recipe by itself, and not a fragment that others include."""
    try:
        return "policy" in read_inherited(file)
    except RlcoreError:
        return True


def verl_cases(checkout: Path) -> Iterator[Case]:
    """The runs of verl's scripts."""
    for script in sorted((checkout / "examples").rglob("*.sh")):
        text = re.sub(r"\\\s*\n", " ", script.read_text(encoding="utf-8"))
        command = re.search(r"verl\.trainer\.main_ppo\b(.*)", text)
        if command is None:
            continue
        try:
            words = shlex.split(command[1], comments=True)
        except ValueError:
            words = command[1].split()
        overrides = tuple(word for word in words if re.match(r"\+{0,2}[a-z_][\w.]*=", word) and "$" not in word)
        config = MEGATRON_CONFIG if "ppo_megatron_trainer" in text else PPO_CONFIG
        kind = next((word.partition("=")[2] for word in overrides if "adv_estimator=" in word), "gae")
        yield Case(name=str(script.relative_to(checkout / "examples")), kind=kind, file=checkout / config, overrides=overrides)


def problem_of(case: Case, library: str, directory: Path) -> tuple[str, int]:
    """Why a recipe does not pass, or an empty text, and how many keys changed their meaning."""
    importer = nemo_rl.import_recipe if library == "nemo-rl" else verl.import_recipe
    try:
        found = importer(case.file, case.overrides)
        recipe = directory / "recipe.toml"
        recipe.write_text(recipe_text(found, case.name), encoding="utf-8")
        prepare(recipe)
    except RlcoreError as error:
        problems = [str(one) for one in getattr(error, "problems", [error])]
        if wrong := [one for one in problems if not any(words in one for words in NOT_OF_RECIPES)]:
            return " ".join("; ".join(wrong).split()), 0
    return "", sum(one.changes_meaning for one in found.unmapped)


def coverage(cases: Sequence[Case], library: str) -> Iterator[str]:
    """The lines of the report: what does not pass, and the counts by algorithm."""
    passed: Counter[str] = Counter()
    all_of: Counter[str] = Counter(case.kind for case in cases)
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            problem, _ = problem_of(case, library, Path(scratch))
            passed[case.kind] += not problem
            if problem:
                yield f"- {case.name}: {problem}"
    for kind, number in sorted(all_of.items()):
        yield f"{kind}: {passed[kind]} of {number}"
    yield f"all: {passed.total()} of {all_of.total()} ({passed.total() / max(1, all_of.total()):.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--library", choices=("nemo-rl", "verl"), default="nemo-rl")
    arguments = parser.parse_args()
    cases = list((nemo_cases if arguments.library == "nemo-rl" else verl_cases)(arguments.checkout))
    if not cases:
        sys.exit(f"found no recipes of {arguments.library} in {arguments.checkout}; expected the root of a checkout")
    for line in coverage(cases, arguments.library):
        print(line)


if __name__ == "__main__":
    main()
