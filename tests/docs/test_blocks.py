"""No code block of a document is left out silently: each is run or checked by a test, or is listed here with the reason."""

import ast
import json
import re
import tomllib
from collections import Counter

import pytest
from markdown_blocks import DOCUMENTS, ROOT, blocks, write_files

from rlcore.config.load import read_raw
from rlcore.registry.discovery import discover
from rlcore.run.plan.sections import convert_recipe

RUN_BY = {
    "README.md": "tests/docs/test_documents.py",
    "docs/agents.md": "tests/system/test_agents.py",
    "docs/design.md": "tests/docs/test_design_document.py",
    "docs/inspect.md": "tests/system/test_checkpoint_evaluation.py",
    "docs/moving.md": "tests/docs/test_moving_document.py",
    "docs/own-loop.md": "tests/session/test_own_loop_document.py",
    "docs/compare.md": "tests/bundles/test_compare_document.py",
    "docs/plugins.md": "tests/docs/test_plugin_examples.py",
    "docs/python.md": "tests/docs/test_python_document.py",
    "docs/quickstart.md": "tests/docs/test_recipe_documents.py",
    "docs/rewards.md": "tests/docs/test_rewards_document.py",
    "plugins/report/README.md": "tests/docs/test_callbacks_document.py",
    "docs/run-directory.md": "tests/docs/test_run_directory_document.py",
    "docs/tinker.md": "tests/tinker/test_tinker_document.py",
    "docs/tools.md": "tests/docs/test_tools_document.py",
    "docs/train-inference-agreement.md": "tests/system/test_logprob_mismatch.py",
    "docs/tutorials/": "tests/docs/test_tutorials.py",
    "plugins/session/README.md": "tests/session/test_own_loop_document.py",
    "plugins/workers/README.md": "tests/workers/test_pool.py",
}
"""Which test runs the Python of a document, or of all in a folder."""
NOT_RUN = {
    (
        "docs/agents.md",
        "async def run",
    ): "needs a model that answers in words: tests/system/test_agents.py runs a function of the same form",
    (
        "plugins/workers/README.md",
        "from rlcore_workers.pool",
    ): "names a package of the reader's: tests/workers/test_pool.py calls such a pool",
    ("docs/tutorials/2-your-reward.md", "from rewards import"): "run below, with the page's own file",
}
"""Python that no test of RUN_BY runs as it stands: its document, how it begins, and why."""
PROGRAMS = {
    "rlcore": "test_documents.py parses it with rlcore's own command line",
    "make": "test_documents.py looks for its target in the Makefile",
    "python": "a script of the document or of this repository",
    "python3": "makes a virtual environment",
    ".venv/bin/python": "a script of this repository",
    ".venv/bin/pre-commit": "writes a hook into .git: tests/release/test_hooks.py reads what it runs",
    "sudo": "needs the right to set priorities: the script is one of this repository",
    "pytest": "the conformance kit, which test_plugin_examples.py runs",
    ".": "enters a virtual environment",
    "grep": "reads a file of a run",
    "pip": "names packages, whose extras are checked below",
    "ray": "needs several machines",
    "sbatch": "needs Slurm: test_launch.py checks its options",
    "srun": "needs Slurm: test_launch.py checks the command behind it",
    "kubectl": "needs Kubernetes: test_launch.py checks the manifest",
    "podman": "needs images of the network: tests/release/test_container.py checks the statements",
    "lm_eval": "a harness with an environment of its own: tests/system/test_checkpoint_evaluation.py",
    "inspect": "likewise",
    "curl": "speaks to a server that the page started",
    "vllm": "starts a server on a GPU",
    "nsys": "needs Nsight Systems and a GPU: tests/profiler traces by torch.profiler",
    "gym": "starts servers of NeMo Gym: tests/nemo_gym_environment starts them by hand",
}
"""Programs of console blocks, and what checks them or keeps them from being run."""
TEXTS = {
    "docs/compare.md": "the command's output: tests/bundles/test_compare_document.py compares it",
    "docs/design.md": "drawings",
    "docs/environments.md": "three keys of NeMo Gym's YAML",
    "docs/importing.md": "commands on recipes of other libraries: tests/recipe_import",
    "docs/lm-evaluation-harness.md": "a harness's own format: tests/system/test_checkpoint_evaluation.py runs it",
    "docs/megatron.md": "a line of `rlcore check` on GPUs that no test has",
    "docs/monitoring.md": "three keys of Prometheus' YAML",
    "docs/plan.md": "commands for GPUs that are not here, and what they print: tests/docs/test_plan_document.py",
    "docs/plugins.md": "an outline of a trainer, in no language",
    "docs/releasing.md": "what `rlcore plugins` prints of another version: tests/core/registry/test_version_compatibility.py",
    "docs/spi.md": "properties: tests/docs/test_spi_document.py",
}
"""Documents with blocks of plain text, which no test reads."""
OWN_PLUGINS = {("docs/plugins.md", "recipe.toml"): "names the page's own plugins: test_plugin_examples.py trains with it"}
"""Recipes that need what only their page installs."""
BASE = 'model.path = "model"\nalgorithm.name = "grpo"\nenvironment.name = "arithmetic"\n'


def name_of(document):
    return str(document.relative_to(ROOT))


def found(language):
    return [
        pytest.param(document, block, id=f"{name_of(document)}: {block.text[:30]!r}")
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == language
    ]


def test_every_block_is_of_a_kind_that_is_checked():
    kinds = Counter(block.language for document in DOCUMENTS for block in blocks(document))
    assert kinds.keys() == {"console", "python", "toml", "json", "text"}
    assert min(kinds.values()) >= 2
    for document in DOCUMENTS:
        fences = len(re.findall(r"^ *(```|~~~)", document.read_text(), re.MULTILINE))
        assert fences == 2 * len(list(blocks(document))), f"{name_of(document)} has a block that is indented or has no language"


@pytest.mark.parametrize(("document", "block"), found("python"))
def test_python_is_run_by_the_test_that_is_named(document, block):
    ast.parse(block.text)
    name = name_of(document)
    runs = [test for beginning, test in RUN_BY.items() if name.startswith(beginning)]
    assert runs, f"{name} has Python that no test runs"
    words = (ROOT / runs[0]).read_text()
    assert document.name in words or document.parent.name == "tutorials" or document.stem in words or "README" in words


def test_what_is_not_run_is_there():
    for (name, beginning), reason in NOT_RUN.items():
        assert reason
        assert any(block.text.startswith(beginning) for block in blocks(ROOT / name)), f"{name} has no block {beginning!r}"


def test_the_functions_of_the_tutorial_return_what_their_page_says(tmp_path, monkeypatch, capsys):
    document = ROOT / "docs/tutorials/2-your-reward.md"
    write_files(document, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    [block] = [block for block in blocks(document) if block.text.startswith("from rewards import")]
    exec(block.text, {})
    assert capsys.readouterr().out == "True 0.5\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each document, with the files that it writes and those of the repository that recipes extend."""
    made = {}
    for document in DOCUMENTS:
        made[document] = tmp_path_factory.mktemp("document")
        write_files(document, made[document])
        (made[document] / "recipes").symlink_to(ROOT / "recipes")
        for recipe in (ROOT / "recipes").glob("*.toml"):
            (made[document] / recipe.name).symlink_to(recipe)
    return made


@pytest.fixture(scope="module")
def registry():
    return discover()


@pytest.mark.parametrize(("document", "block"), found("toml"))
def test_recipes_and_fragments_have_keys_that_exist(document, block, folders, registry):
    """Whether plugins accept a whole recipe, the documents' own tests say; here each key is one, with a value of its type."""
    values = tomllib.loads(block.text)
    if "project" in values or "build-system" in values:
        return  # a package's description, which is installed by the document's own test
    if (name_of(document), block.file_name) in OWN_PLUGINS:
        return
    folder = folders[document]
    text = block.text
    if "extends" not in values:
        given = {name for name, table in values.items() if isinstance(table, dict) and {"name", "path"} & table.keys()}
        lines = [line for line in BASE.splitlines() if line.partition(".")[0] not in given]
        (folder / "base-of-fragments.toml").write_text("\n".join(lines) + "\n")
        text = f'extends = "base-of-fragments.toml"\n{text}'
    (folder / "fragment.toml").write_text(text)
    recipe, _ = convert_recipe(read_raw(folder / "fragment.toml", []), registry)
    assert recipe.model.path


@pytest.mark.parametrize(("document", "block"), found("json"))
def test_json_parses(document, block):
    assert json.loads(block.text)


@pytest.mark.parametrize(("document", "block"), found("console"))
def test_consoles_run_programs_that_are_known(document, block):
    assert block.text.startswith("$ ")
    for line in re.findall(r"^\$ (.*)", block.text, re.MULTILINE):
        [(program, script)] = re.findall(r"^(?:\w+=\S+ )*(\S+) ?(\S*)", line)
        assert program in PROGRAMS, f"{name_of(document)}: {line}"
        if "python" in program:
            known = {written.file_name for written in blocks(document)}
            assert script.startswith("-") or script in known or (ROOT / script).exists(), f"{name_of(document)} runs {script}"


def extras():
    """Each distribution of this repository, with the extras that it has."""
    projects = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("*/pyproject.toml")]
    projects += [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("plugins/*/pyproject.toml")]
    return {project["name"]: set(project.get("optional-dependencies", {})) for project in projects}


_REQUIREMENT = re.compile(r"(?<![\w./-])(rlcore(?:-[a-z0-9]+)*)(?:\[([\w,]+)\])?(?![\w-])")


@pytest.fixture(scope="module")
def projects():
    """The description of each distribution of this repository."""
    folders = [ROOT / "core", ROOT / "torchkit", *(ROOT / "plugins").iterdir()]
    found = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in folders if folder.is_dir()]
    return {project["name"]: project for project in found}


def installed_by(commands, projects):
    """The distributions of this repository that `pip install` commands bring, with what they require."""
    found, wanted = set(), [match.groups() for command in commands for match in _REQUIREMENT.finditer(command)]
    while wanted:
        name, extras = wanted.pop()
        for extra in ["", *(extras or "").split(",")]:
            if (name, extra) in found or name not in projects:
                continue
            found.add((name, extra))
            project = projects[name]
            required = project["optional-dependencies"][extra] if extra else project["dependencies"]
            wanted += [match.groups() for line in required if (match := _REQUIREMENT.match(line))]
    return {name for name, _ in found}


@pytest.mark.parametrize(("document", "block"), [case for case in found("console") if "pip install" in case.values[1].text])
def test_a_block_installs_what_its_commands_need(document, block, projects):
    lines = [line.removeprefix("$ ") for line in block.text.splitlines()]
    brought = installed_by([line for line in lines if line.startswith("pip install")], projects)
    named = {
        (group, name): project["name"]
        for project in projects.values()
        for group, names in project.get("entry-points", {}).items()
        for name in names
    }
    for program, command, *arguments in [line.split() for line in lines if line.startswith("rlcore ") and brought]:
        needed = {named[program + ".commands", command]}
        if command == "verify":
            needed |= {distribution for (_, name), distribution in named.items() if name == arguments[0]}
        assert needed <= brought, f"{name_of(document)}: rlcore {command} needs {sorted(needed - brought)}"


def test_environments_of_agents_are_installed_with_what_collects_their_samples(registry, projects):
    agents = {
        entry.distribution
        for entry in registry.of("environment")
        if entry.provider and "agent" in entry.provider.capabilities and entry.distribution in projects
    }
    assert {"rlcore-openenv", "rlcore-nemo-gym"} <= agents
    for document in DOCUMENTS:
        for block in blocks(document):
            for line in re.findall(r"^\$ (pip install .*)", block.text, re.MULTILINE):
                brought = installed_by([line], projects)
                assert not brought & agents or "rlcore-serve" in brought, f"{name_of(document)}: {line}"


def test_packages_that_documents_install_have_the_extras():
    known = extras() | {"rlcore-riddles": {"test"}}  # the page makes it
    named = [
        (document, match)
        for document in DOCUMENTS
        for line in re.findall(r"pip install (.*)", document.read_text())
        for match in re.finditer(r"(?<![\w-])(rlcore(?:-\w+)*)(?:\[([\w,]+)\])?", line)
    ]
    assert len(named) > 5
    for document, match in named:
        wanted = set(match[2].split(",")) if match[2] else set()
        assert match[1] in known, f"{name_of(document)} installs {match[1]}"
        assert wanted <= known[match[1]], f"{name_of(document)} installs {match[0]}"


def test_plain_text_is_listed():
    assert {
        name_of(document) for document in DOCUMENTS for block in blocks(document) if block.language == "text"
    } == TEXTS.keys()


def test_the_tests_that_are_named_are_there():
    assert [path for path in RUN_BY.values() if not (ROOT / path).is_file()] == []
