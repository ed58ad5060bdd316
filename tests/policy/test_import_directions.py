"""Who may import whom, and what importing the core must not cost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = sorted({path.parent.name for path in ROOT.glob("core/src/rlcore/*/__init__.py")} - {"testing"})
"""Parts of the core that import no torch, transformers or ray at module level."""

IMPORT_ALL = """
import importlib, json, pkgutil, sys
heavy = {"torch", "transformers", "ray", "datasets", "tokenizers", "safetensors", "vllm", "megatron", "tensorboard"}
import rlcore
found = {"rlcore": sorted({*heavy, "numpy"} & sys.modules.keys())}
for part in sys.argv[1:]:
    before = set(sys.modules)
    package = importlib.import_module(part)
    for module in pkgutil.walk_packages(package.__path__, part + "."):
        importlib.import_module(module.name)
    found[part] = sorted(heavy & (sys.modules.keys() - before))
print(json.dumps(found))
"""


def test_the_contracts_hold(root):
    """Those of pyproject.toml, and those between packages, which release/import_contracts.py computes."""
    command = [sys.executable, str(root / "release" / "import_contracts.py")]
    result = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.fixture(scope="module")
def imported():
    """The heavy modules that each part brings: every module of it is imported; of `rlcore` itself the package alone."""
    command = [sys.executable, "-c", IMPORT_ALL, *(f"rlcore.{part}" for part in PARTS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["rlcore", *(f"rlcore.{part}" for part in PARTS)])
def test_importing_the_core_imports_nothing_heavy(name, imported):
    assert imported[name] == []
