"""Links lead somewhere, commands have the options that they are written with, and README shows the demo's recipe."""

import re
import shlex

import click
import pytest
from attrs import frozen
from markdown_blocks import DOCUMENTS, ROOT, anchor_of, blocks

from rlcore.cli.main import cli
from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer

README = ROOT / "README.md"
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(heading) for heading in _HEADING.findall(text)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target, anchor in _LINK.findall(document.read_text()):
        path = document if not target else (document.parent / target).resolve()
        assert path.exists(), f"{document.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(path), f"{document.name} links to {target}#{anchor}, which is no heading there"


def test_the_table_of_what_to_change_names_paths_that_exist():
    section = (ROOT / "docs/design.md").read_text().partition("\n## Where to change what\n")[2].partition("\n## ")[0]
    paths = re.findall(r"`([^`]+)`", section)
    assert "core/src/rlcore/config/recipe.py" in paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    rows = [line for line in section.partition("\nAnd others")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    assert not [row for row in rows if len(re.findall(r"`[^`]+`", row)) > 4]


def commands():
    """Every `rlcore …` of the documents' console blocks."""
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.language == "console":
                for line in block.text.splitlines():
                    if line.startswith("$ rlcore ") and line != "$ rlcore --help":
                        yield pytest.param(shlex.split(line)[2:], id=line[2:])


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_exist_with_their_options(arguments):
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None
    if "--help" not in arguments:
        command.make_context(arguments[0], arguments[1:])


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(r"(?:^\$ |`)(?:\w+=\S+ )*make ([\w-]+)", document.read_text(), re.MULTILINE)
    }
    assert {"demo", "test", "lint", "docs"} <= named <= targets


@pytest.mark.parametrize("name", ["demo-grpo.toml", "demo-arithmetic.toml"])
def test_readme_shows_the_demos_recipe(name):
    shown = [block.text for block in blocks(README) if block.language == "toml"]
    assert (ROOT / "recipes" / name).read_text() in shown, f"copy recipes/{name} into README.md, the demo's recipe"


def test_every_document_is_in_the_readme():
    text = README.read_text()
    for path in (ROOT / "docs").glob("**/*.md"):
        assert f"({path.relative_to(ROOT)}" in text, f"README.md does not mention {path.relative_to(ROOT)}"


@frozen(kw_only=True)
class Example:
    """README's environment, as its block defines it."""

    provider: object
    entry_point: str


@pytest.fixture
def example(tmp_path, monkeypatch):
    (source,) = (block for block in blocks(README) if block.file_name == "acme_vowels.py")
    (entry,) = (block for block in blocks(README) if "entry-points" in block.text)
    (tmp_path / "acme_vowels.py").write_text(source.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    import acme_vowels

    return Example(provider=acme_vowels.PROVIDER, entry_point=entry.text)


RECIPE = """
[run]
num_steps = 30
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "vowels"
[data.evaluation]
[rollout]
max_prompt_tokens = 32
max_response_tokens = 4
[training]
prompts_per_step = 8
[optimizer]
learning_rate = 0.1
[evaluation]
temperature = 1.0
[sinks]
names = []
"""


def test_readmes_environment_trains(example, tmp_path):
    assert 'vowels = "acme_vowels:PROVIDER"' in example.entry_point
    (tmp_path / "recipe.toml").write_text(RECIPE)
    registry = Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [FAKE_GENERATOR],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [example.provider],
        }
    )
    prepared = prepare(tmp_path / "recipe.toml", [f"run.directory={tmp_path}"], registry=registry)
    summary = train(prepared, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    assert summary["steps"] == 30
    assert summary["last_step"]["eval/reward_mean"] > 0.5
