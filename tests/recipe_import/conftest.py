"""Writing recipes of other libraries, importing them, and whether what comes out is a recipe of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli.import_recipe import recipe_text
from rlcore.config.load import read_raw
from rlcore.run.plan.sections import convert_recipe
from rlcore.spi import ImportedRecipe

Imported = Callable[..., ImportedRecipe]


@pytest.fixture
def valid(tmp_path: Path) -> Callable[[ImportedRecipe], Any]:
    """The recipe, once its text is read and each key found to be known, of its type and in its range."""

    def read(found: ImportedRecipe) -> Any:
        file = tmp_path / "imported.toml"
        file.write_text(recipe_text(found, "a test"))
        return convert_recipe(read_raw(file, ()))[0]

    return read
