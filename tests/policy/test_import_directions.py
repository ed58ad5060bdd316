"""Who may import whom, and what importing the core must not cost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = sorted({path.parent.name for path in ROOT.glob("core/src/rlcore/*/__init__.py")} - {"testing"})
"""Parts of the core that import no torch, transformers or ray at module level."""

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(module.name)
heavy = {{"torch", "transformers", "ray", "datasets", "tokenizers", "safetensors", "vllm", "megatron", "tensorboard"}}
print(sorted(heavy & sys.modules.keys()))
"""


def test_the_contracts_hold(root):
    """Those of pyproject.toml, and those between packages, which release/import_contracts.py computes."""
    command = [sys.executable, str(root / "release" / "import_contracts.py")]
    result = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("name", ["rlcore", *(f"rlcore.{part}" for part in PARTS)])
def test_importing_the_core_imports_nothing_heavy(name):
    """Every module of the part, not only its package; of `rlcore` itself the package alone."""
    script = "import rlcore, sys\nprint(sorted({'torch', 'transformers', 'ray', 'numpy'} & sys.modules.keys()))"
    if name != "rlcore":
        script = IMPORT_ALL.format(name=name)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
