"""Continuous integration runs each target of the Makefile and each documented command, or a list gives the reason."""

import re
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import yaml

from rlcore import __version__

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/releasing.md")
CI, WORKFLOW, README_TEST = ".ci/run", ".github/workflows/ci.yml", "tests/docs/test_readme_commands.py"
PUBLISH = ".github/workflows/publish.yml"
RUN = {
    "make test-core": CI,
    "make test-next": WORKFLOW,
    "make dist": CI,
    "make try-dist": CI,
    "make test": CI,
    "make test-all": PUBLISH,
    "make lint": "make test",
    "make lint-format": "make lint",
    "make lint-types": "make lint",
    "make lint-imports": "make lint",
    "make lint-dependencies": "make lint",
    "make setup-dev": "make lint",
    "make setup": "make demo",
    "make demo": WORKFLOW,
    "make site": WORKFLOW,
    "make docs": WORKFLOW,
    "pip install torch": WORKFLOW,
    "pip install --find-links dist 'rlcore[laptop]'": WORKFLOW,
    "pip install --find-links dist 'rlcore[rollout]' rlcore-doctor rlcore-megatron rlcore-transformers rlcore-grpo": WORKFLOW,
    "rlcore plugins": WORKFLOW,
    "rlcore check recipe.toml": README_TEST,
    "rlcore train recipe.toml": README_TEST,
    "rlcore train recipe.toml run.name=other training.prompts_per_step=8": README_TEST,
    "rlcore train recipe.toml --resume": README_TEST,
    "rlcore eval recipe.toml --checkpoint runs/run/checkpoints/step-000100": README_TEST,
    "rlcore status runs/run": README_TEST,
    "rlcore report runs/run runs/other -o report.html": README_TEST,
    "sudo .venv/bin/python -m pytest tests/datacentre": WORKFLOW,
    ".venv/bin/python release/set_version.py 0.2.0": "tests/release/test_set_version.py",
}
"""The script, target or test that runs each command."""
NOT_RUN = {
    "make test-changed": "runs some of the tests of `make test`; tests/policy/test_changed.py holds which",
    "make oracle": "runs some of the tests of `make test-all`",
    "make kills": "takes an hour; `make test-all` kills a run a few times (tests/system/test_random_kills.py)",
    "make chaos": "takes hours; `make test-all` runs one fault in each layout (tests/system/test_chaos.py)",
    "make mutants": "prints what tests/mutants and tests/conformance assert",
    ".venv/bin/pre-commit install": "changes the clone's hooks; tests/release/test_hooks.py checks what these run",
    "make clean": "removes the environments that the other targets use",
    ".venv/bin/python -m pytest tests/grpo": "`make test` runs these tests with all others",
    ".venv/bin/python -m pytest -m gpu": "needs a CUDA device",
    "podman build --tag rlcore .": "compiles for GPUs; tests/release/test_container.py checks the statements",
    "podman build --file Containerfile.cpu --tag rlcore-cpu .": "needs an image of Python; test_container.py checks it",
    'podman run --rm --device nvidia.com/gpu=all --shm-size 16g --volume "$PWD:/work" rlcore train recipe.toml': "needs a GPU",
}
"""Commands that nothing runs, each with the reason."""


def targets() -> dict[str, list[str]]:
    """The Makefile's targets that make no file, with what they need first and what they make."""
    text = (ROOT / "Makefile").read_text()
    (names,) = re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE)
    needs = {
        name: first + rest
        for name, first, rest in re.findall(r"^([\w-]+):(?!=)(.*)((?:\n\t\$\(MAKE\).*)?)", text, re.MULTILINE)
    }
    assert needs.keys() == set(names.split())
    return {name: needs[name].split() for name in needs}


def commands(text: str) -> set[str]:
    """The commands of a document's console blocks, and the targets that its sentences name."""
    found = set(re.findall(r"^\$ (.*)", text, re.MULTILINE))
    return found | {f"make {name}" for name in re.findall(r"`(?:[A-Z]+=\S+ |[A-Z]+=\"[^\"]*\" )*make ([\w-]+)", text)}


def test_every_command_is_run_or_listed_with_the_reason() -> None:
    written = {f"make {name}" for name in targets()} | set(
        chain.from_iterable(commands((ROOT / name).read_text()) for name in DOCUMENTS)
    )
    assert len(written) > 20
    assert not written - RUN.keys() - NOT_RUN.keys(), "add them to .ci/run or to a workflow, and to RUN; or to NOT_RUN"
    assert not (RUN.keys() | NOT_RUN.keys()) - written, "no document has these, and the Makefile has no such target"
    assert not RUN.keys() & NOT_RUN.keys()


def lines_of(place: str) -> set[str]:
    """The commands that a script or the steps of a workflow consist of."""
    text = (ROOT / place).read_text()
    if place in (WORKFLOW, PUBLISH):
        jobs = yaml.safe_load(text)["jobs"].values()
        rows = [row for job in jobs for row in job.get("strategy", {}).get("matrix", {}).get("include", ())]
        text = "\n".join([step.get("run", "") for job in jobs for step in job["steps"]] + [row["commands"] for row in rows])
    lines = {re.sub(r" [A-Z]+=.*", "", line.strip()) for line in text.splitlines()}
    together = (line.split() for line in lines if line.startswith("make "))
    return lines | {f"make {word}" for words in together for word in words[1:] if not word.startswith("-")}


@pytest.mark.parametrize(("command", "place"), RUN.items())
def test_what_runs_a_command_contains_it(command: str, place: str) -> None:
    if place.startswith("make "):
        assert command.removeprefix("make ") in targets()[place.removeprefix("make ")]
        assert place in RUN
    elif place.startswith("tests/"):
        assert (ROOT / place).is_file()
    else:
        assert command in lines_of(place)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["test-next"], ".venv-next-python3.12/bin/pip install --disable-pip-version-check --no-compile --upgrade torch "),
        (["test-next", "NEXT_PYTHON=/opt/bin/python3.13"], ".venv-next-python3.13/bin/pip install"),
        (["try-dist"], f"'rlcore[laptop]=={__version__}'"),
    ],
)
def test_what_a_target_runs_though_its_environment_is_there(arguments: list[str], expected: str) -> None:
    made = [f"--old-file=.venv-next-python3.{minor}/.installed" for minor in (12, 13)]
    printed = subprocess.run(["make", "--dry-run", *made, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    assert expected in printed.stdout


def test_continuous_integration_ends_with_the_first_step_that_fails_and_shows_the_tests_last() -> None:
    lines = (ROOT / CI).read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-1].startswith("make test ")
    assert not [line for line in lines if "||" in line or line.endswith("&") or "|" in line]
