"""What recipes and pages read below `runs` is what a documented command writes there."""

import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.config.load import read_raw

ROOT = Path(__file__).parents[2]
RECIPES = {path.name: path.read_text() for path in sorted((ROOT / "recipes").glob("*.toml"))}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "docs/**/*.md", "core/*.md", "torchkit/*.md", "plugins/*/*.md")
    for path in sorted(ROOT.glob(pattern))
}
TEXTS = "\n".join((*RECIPES.values(), *PAGES.values()))
SCRIPT = re.compile(r"(?:python \S*/\w+\.py |make_image_model\(Path\(')(runs/[\w/-]+)")
"""A documented script, and the folder that it writes."""


def values(name: str) -> dict[str, Any]:
    """A recipe with what it extends; its files as seen from the repository's root."""
    recipe = dict(read_raw(ROOT / "recipes" / name, []).values)
    for section in recipe.get("data", {}).values():
        if "path" in section:
            section["path"] = section["path"].removeprefix(f"{ROOT}/")
    return recipe


@pytest.fixture(scope="module")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The overrides with which `make demo` and the calculator's demo train each of their recipes; nothing is trained."""
    found: dict[str, dict[str, str]] = {}
    folder = tmp_path_factory.mktemp("demos")

    def train(recipe: Path, *overrides: str) -> SimpleNamespace:
        given = dict(override.replace(f"{folder}/", "").split("=", 1) for override in overrides)
        found[recipe.name] = given
        return SimpleNamespace(model=f"{given['run.directory']}/{values(recipe.name)['run']['name']}/model", summary={})

    def make_model(path: Path, *_: object, **__: object) -> Path:
        path.mkdir(parents=True)
        (path / "tokenizer_config.json").write_text("{}")
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "demo"))
        patch.setattr("rlcore_torchkit.testing.models.make_model", make_model)
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: None)
        patch.setattr("rlcore.rows", lambda *_: [])
        patch.setattr("rlcore.train", train)
        for demo in ("run.py", "calculator.py"):
            patch.setattr(sys, "argv", [demo, f"--directory={folder}/runs"])
            runpy.run_path(str(ROOT / "demo" / demo), run_name="__main__")
    return found


def test_the_demos_recipes_name_what_the_demos_write(demo_runs: dict[str, dict[str, str]]) -> None:
    assert len(demo_runs) == 4
    for name, given in demo_runs.items():
        recipe = values(name)
        assert recipe["model"]["path"] == given["model.path"]
        if "data.train.path" in given:
            assert recipe["data"]["train"]["path"] == given["data.train.path"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_model_is_on_the_hub_or_written_by_a_documented_command(
    name: str, demo_runs: dict[str, dict[str, str]]
) -> None:
    made = {given["model.path"] for given in demo_runs.values()} | set(SCRIPT.findall(TEXTS))
    recipes = [recipe for recipe in map(values, RECIPES) if "run" in recipe]
    exporting = [recipe for recipe in recipes if recipe.get("checkpoint", {}).get("export") == "hf"]
    made |= {f"runs/{recipe['run']['name']}/model" for recipe in exporting}
    made |= {f"{folder}/{below}" for folder in SCRIPT.findall(TEXTS) for below in ("student", "teacher", "warm-start/model")}
    recipe = values(name)
    for model in [recipe[section]["path"] for section in ("model", "reference") if section in recipe]:
        assert re.fullmatch(r"(?!runs/)[\w.-]+/[\w.-]+", model) or model in made, f"no documented command writes {model}"


def run_names(text: str) -> Iterator[str]:
    """The names of the runs that recipes and commands of a text make."""
    yield from re.findall(r"\brun\.name=([\w-]+)", text)
    yield from re.findall(r'^train\("([\w-]+)"', text, re.MULTILINE)  # a page's own function
    for block in re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from [name] if (name := tomllib.loads(block).get("run", {}).get("name")) else []


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "runs/" in text])
def test_a_pages_run_directories_are_written_by_a_documented_command(page: str, demo_runs: dict[str, dict[str, str]]) -> None:
    made = {f"runs/{name}" for text in PAGES.values() for name in run_names(text)}
    made |= {f"runs/{recipe['run']['name']}" for recipe in map(values, RECIPES) if "run" in recipe}
    made |= {"runs/run"} | {given["run.directory"] for given in demo_runs.values()}
    made |= {"/".join(folder.split("/")[:2]) for folder in SCRIPT.findall(TEXTS)}
    named = set(re.findall(r"(?<![\w/])runs/[a-z\d][\w.-]*(?<!\.)", PAGES[page]))
    assert not named - made, "no documented command makes these runs"
