"""The core works with any backend because it knows none: no plugin's name occurs in it."""

import ast
import re

import pytest

from rlcore.spi import API_GROUP, CHANNEL_GROUP, COLLECTOR_GROUP, COMMAND_GROUP, DATASET_GROUP, LOOP_OBSERVER_GROUP

NO_BACKENDS = {API_GROUP, CHANNEL_GROUP, COLLECTOR_GROUP, COMMAND_GROUP, DATASET_GROUP, LOOP_OBSERVER_GROUP}
"""Groups whose names are those of functions, commands, file formats, ways to send bytes, kinds of runs and keys of a recipe."""
FORTHCOMING = {"megatron", "vllm"}
"""Backends that are not here yet, or no longer."""
EVERYDAY = {"transformers", "math", "arithmetic", "openai", "code", "function", "judge", "agent"}
"""Names that are also a library's or a common word's: their distributions' and import names are looked for instead."""
LIBRARIES = {"transformers", "openai"}
"""Everyday names by which the core asks for a library."""
FIELDS = {"code", "function", "agent"}
"""Everyday names that are fields of OpenAI's API, or a capability."""

OBJECTIVES = {"cispo", "gmpo", "sapo", "vespo"}
"""Names that papers gave to formulas of the loss: torchkit has the formulas, and presets of GRPO bear the names."""


@pytest.fixture(scope="module")
def names(plugin_projects):
    """Return a backend's names: those of its plugins, but for NO_BACKENDS, of its distribution and of its package."""
    found = set(FORTHCOMING)
    for package, project in plugin_projects.items():
        found |= {package, project["project"]["name"]}
        groups = project["project"].get("entry-points", {})
        found |= {name for group, names in groups.items() if group not in NO_BACKENDS for name in names}
    return found - EVERYDAY


def test_there_are_names_to_look_for(names):
    assert {"fsdp2", "megatron", "ray", "grpo", "sft", "vllm", "rlcore_transformers", "rlcore-math"} <= names


def test_no_backends_name_occurs_in_the_core(core_files, names):
    """In no line, comments and docstrings included."""
    pattern = re.compile(
        rf"(?<![A-Za-z])({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})(?![A-Za-z])", re.IGNORECASE
    )
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in core_files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def literals(tree):
    """String constants of a module, its docstrings left out."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node


def test_no_code_of_the_core_depends_on_a_backends_name(core_files, torchkit_files, names):
    """Nor in torchkit, and here the everyday names count too, but for the libraries and fields that have some of them."""
    forbidden = {name.lower() for name in names | EVERYDAY} - LIBRARIES - FIELDS
    quoted = re.compile(rf"""["']({"|".join(map(re.escape, forbidden))})["']""", re.IGNORECASE)
    texts = {path: text for path in (*core_files, *torchkit_files) if quoted.search(text := path.read_text())}
    found = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path, text in texts.items()
        for node in literals(ast.parse(text))
        if node.value.lower() in forbidden - (OBJECTIVES if path in torchkit_files else set())
    ]
    assert not found, "\n".join(found)
