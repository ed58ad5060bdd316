"""The names of rlcore.spi: each is imported where it is asked for, and the same one for type checkers."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import rlcore.spi

BLOCK = [node for node in ast.parse(Path(rlcore.spi.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
MODULES = [node.module for node in BLOCK[0].body if isinstance(node, ast.ImportFrom)]
"""The modules that type checkers import all names of."""


def test_every_name_is_that_of_its_module_for_type_checkers_too() -> None:
    assert set(rlcore.spi.__all__) <= set(dir(rlcore.spi))
    seen = {name: found for module in MODULES for name, found in vars(import_module(module)).items()}
    for name in set(rlcore.spi.__all__) - {"capabilities"}:
        assert getattr(rlcore.spi, name) is seen[name]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rlcore.spi' has no attribute 'Providers'"):
        rlcore.spi.Providers  # noqa: B018 - which is what is asked
    with pytest.raises(ImportError):
        from rlcore.spi import Providers  # noqa: F401


def test_what_a_provider_needs_imports_no_numpy() -> None:
    code = "import sys\nfrom rlcore.spi import Provider, capabilities, PlanContext, CheckContext, Problem, LoraSpec\n"
    subprocess.run([sys.executable, "-c", code + "assert 'numpy' not in sys.modules"], check=True, timeout=300)
