"""Who may import whom, and what importing the core must not cost."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PARTS = (
    "spi",
    "schema",
    "registry",
    "config",
    "sessions",
    "agents",
    "chat",
    "run",
    "serve",
    "cli",
)
"""Parts of the core that import no torch, transformers or ray at module level."""

WINGS = {"rlcore_conformance", "rlcore_report", "rlcore_plan", "rlcore_rewards"}
"""Distributions below plugins/ that build on more of the core than plugins do, by contracts of their own."""

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(module.name)
heavy = {{"torch", "transformers", "ray", "datasets", "tokenizers", "safetensors", "vllm", "megatron", "tensorboard"}}
print(sorted(heavy & sys.modules.keys()))
"""


def test_the_contracts_between_packages_hold(root):
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.fixture(scope="module")
def contracts(root):
    linter = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    return linter["root_packages"], {contract["name"]: contract for contract in linter["contracts"]}


def test_no_plugin_is_left_out_of_the_contracts(contracts, plugin_projects):
    packages, by_name = contracts
    plugins = set(plugin_projects)
    assert set(packages) == {"rlcore", "rlcore_torchkit", *plugins}
    assert set(by_name["Plugins do not import each other"]["modules"]) == plugins
    outward = by_name["Plugins import the SPI, schema and torchkit, and nothing else of the core"]
    assert set(outward["source_modules"]) == plugins - WINGS
    forbidding = {
        name: contract for name, contract in by_name.items() if "rlcore_fsdp2" in contract.get("forbidden_modules", ())
    }
    for name, contract in forbidding.items():
        assert plugins - set(contract["source_modules"]) <= set(contract["forbidden_modules"]), name
    sources = {source for one in by_name.values() if one["type"] == "forbidden" for source in one["source_modules"]}
    assert sources >= plugins


def test_no_part_of_the_core_is_left_out_of_the_contracts(contracts, root):
    folders = {path.parent.name for path in (root / "core" / "src" / "rlcore").glob("*/__init__.py")}
    assert folders == {*PARTS, "testing"}
    (inward,) = (contract for name, contract in contracts[1].items() if name.startswith("The core imports neither"))
    assert set(inward["source_modules"]) == {f"rlcore.{part}" for part in PARTS}


@pytest.mark.parametrize("name", ["rlcore", *(f"rlcore.{part}" for part in PARTS)])
def test_importing_the_core_imports_nothing_heavy(name):
    """Every module of the part, not only its package; of `rlcore` itself the package alone."""
    script = "import rlcore, sys\nprint(sorted({'torch', 'transformers', 'ray', 'numpy'} & sys.modules.keys()))"
    if name != "rlcore":
        script = IMPORT_ALL.format(name=name)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
