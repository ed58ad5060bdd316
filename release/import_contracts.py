"""Check who imports whom: `release/import_contracts.py`. The rules between packages are computed from their folders.

`[tool.importlinter]` in pyproject.toml holds the contracts within the core. This adds those between packages and runs
import-linter on all of them. A package with `imports` below [tool.rlcore] may import these modules too.
"""

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
from importlinter.cli import lint_imports
from packages import ROOT, Package, packages, wings

INTERFACE = {"spi", "schema"}
"""Folders of the core that every plugin may import. Loose modules beside them are for all, too."""
Contract = dict[str, Any]


def configuration(root: Path = ROOT) -> dict[str, Any]:
    """Return pyproject.toml's configuration of import-linter with the contracts between packages."""
    own = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    found = packages(root)
    contracts = [*own["contracts"], *_contracts(found, root)]
    return {**own, "root_packages": [one.module for one in found], "contracts": contracts}


def core_parts(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return the folders of the core that hold modules, and the modules beside them, as Python imports them."""
    source = root / "core" / "src" / "rlcore"
    rooms = sorted(path.parent.name for path in source.glob("*/__init__.py"))
    modules = sorted(path.stem for path in source.glob("*.py") if not path.stem.startswith("__"))
    return [f"rlcore.{name}" for name in rooms], [f"rlcore.{name}" for name in modules]


def _contracts(found: list[Package], root: Path) -> Iterator[Contract]:
    rooms, modules = core_parts(root)
    plugins = [one.module for one in found if one.is_plugin]
    inner = [room for room in rooms if room.removeprefix("rlcore.") not in INTERFACE]
    yield _forbidden(
        "The core imports neither a plugin, nor the torch code that plugins share, nor fakes",
        [part for part in (*rooms, *modules) if part != "rlcore.testing"],
        ["rlcore_torchkit", "rlcore.testing", *plugins],
    )
    (torchkit,) = (one for one in found if one.module == "rlcore_torchkit")
    others = [name for name in plugins if name not in torchkit.imports]
    yield _forbidden("What plugins share builds on the interface alone", ["rlcore_torchkit"], [*inner, *others])
    outside = [room for room in inner if room not in ("rlcore.testing", "rlcore.registry")]
    yield _forbidden(
        "Fakes build on the interface and the registry", ["rlcore.testing"], [*outside, "rlcore_torchkit", *plugins]
    )
    built = wings(found)
    plain = [one.module for one in found if one.is_plugin and one not in built]
    yield _forbidden("Plugins import the interface and torchkit, and nothing else of the core", plain, inner)
    for wing in built:
        granted = [module for module in wing.imports if module not in rooms]
        yield {
            **_forbidden(
                f"{wing.module} imports {', '.join(wing.imports)}, and nothing else of the core",
                [wing.module],
                [room for room in inner if room not in wing.imports],
            ),
            "allow_indirect_imports": True,
            "ignore_imports": list(_arrows(wing.module, granted)),
            "unmatched_ignore_imports_alerting": "none",
        }
    between = [arrow for one in found for arrow in _arrows(one.module, [name for name in one.imports if name in plugins])]
    yield {
        "name": "Plugins import each other only where their pyproject.toml says so",
        "type": "independence",
        "modules": plugins,
        "ignore_imports": between,
        "unmatched_ignore_imports_alerting": "none",
    }


def _forbidden(name: str, sources: list[str], forbidden: list[str]) -> Contract:
    return {"name": name, "type": "forbidden", "source_modules": sources, "forbidden_modules": forbidden}


def _arrows(importer: str, modules: list[str]) -> Iterator[str]:
    """Yield import-linter's expressions for imports of these modules, and of what is inside them, by a package."""
    for module in modules:
        for imported in (module, f"{module}.**"):
            yield from (f"{source} -> {imported}" for source in (importer, f"{importer}.**"))


def main() -> int:
    """Run import-linter on all contracts, and return its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "contracts.toml"
        file.write_text(tomli_w.dumps({"tool": {"importlinter": configuration()}}), encoding="utf-8")
        return lint_imports(config_filename=str(file), no_logo=True)


if __name__ == "__main__":
    sys.exit(main())
