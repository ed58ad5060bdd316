"""Fixtures that import recipes of other libraries and check what is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.config.load import read_raw
from rlcore.run.plan.sections import convert_recipe
from rlcore_import.command import recipe_text
from rlcore_import.recipe import ImportedRecipe
from rlcore_import.verl import import_recipe

from . import verl_batches
from .peer_verl import Batch

Imported = Callable[..., ImportedRecipe]


@pytest.fixture
def valid(tmp_path: Path) -> Callable[[ImportedRecipe], Any]:
    """The recipe, once its text is read and each key found to be known, of its type and in its range."""

    def read(found: ImportedRecipe) -> Any:
        file = tmp_path / "imported.toml"
        file.write_text(recipe_text(found, "a test"))
        return convert_recipe(read_raw(file, ()))[0]

    return read


@pytest.fixture(scope="session")
def read_verl(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """read_verl(KEY=VALUE...) imports a small GRPO configuration of verl's with these arguments."""
    file = tmp_path_factory.mktemp("verl") / "ppo.yaml"
    file.write_text(yaml.safe_dump(verl_batches.CONFIG))
    return lambda *overrides: import_recipe(Path(file), overrides)


@pytest.fixture(scope="session")
def verl_batch() -> Batch:
    return verl_batches.random_batch()
