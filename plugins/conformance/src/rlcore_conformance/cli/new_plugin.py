"""`rlcore new-plugin`: a package with one working plugin, to be changed into one's own."""

import ast
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from rlcore.spi.errors import Problem, StorageError
from rlcore.spi.provider import Role
from rlcore.spi.version import SPI_VERSION

TEMPLATES = Path(__file__).parents[1] / "templates"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TORCH = ("rlcore", "rlcore-torchkit", "attrs>=25.1", "numpy>=1.26", "safetensors>=0.5", "torch>=2.11")
DEPENDENCIES: Mapping[Role, tuple[str, ...]] = {
    "trainer": _TORCH,
    "generator": tuple(name for name in _TORCH if not name.startswith("safetensors")),
    "algorithm": ("rlcore", "attrs>=25.1", "numpy>=1.26"),
    "environment": ("rlcore", "attrs>=25.1"),
    "sink": ("rlcore", "attrs>=25.1"),
    "execution": ("rlcore", "attrs>=25.1"),
}
DEMO: Mapping[Role, str] = {
    "trainer": "--trainer newplugin",
    "sink": "'sinks.names=[\"newplugin\"]'",
    "execution": "cluster.execution=newplugin",
}
"""Arguments with which the demo uses the plugin, where these are not ROLE.name=NAME."""


@click.command("new-plugin")
@click.argument("role", type=click.Choice(list(DEPENDENCIES)))
@click.argument("name")
@click.option("--directory", type=click.Path(path_type=Path), help="The folder to write; rlcore-NAME unless given.")
def new_plugin_command(role: Role, name: str, directory: Path | None) -> None:
    """Write a package with a plugin that works: change it into your own.

    NAME is what recipes call it. The package installs, passes the conformance kit and trains the demo as it is.
    """
    folder = directory or Path(distribution_name(name))
    if problems := [*_name_problems(role, name), *_folder_problems(folder)]:
        raise click.UsageError("\n".join(map(str, problems)))
    try:
        for path, text in package_files(role, name).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error}. Name another folder with --directory") from error
    click.echo(f"{folder}: {role} {name!r}")
    for line in (f"pip install -e '{folder}[test]'", "rlcore plugins", f"rlcore verify {name}", f"pytest {folder}"):
        click.echo(f"  {line}")


def package_files(role: Role, name: str) -> dict[str, str]:
    """The text of each file of a new package, by its path."""
    own, common, package = TEMPLATES / role, TEMPLATES / "common", f"src/{import_name(name)}"
    sources = {
        "pyproject.toml": common / "pyproject.toml",
        "README.md": common / "README.md",
        ".github/workflows/test.yml": common / "test.yml",
        f"{package}/provider.py": own / "provider.py",
        f"{package}/backend.py": own / "backend.py",
        "tests/test_conformance.py": common / "test_conformance.py",
    }
    files = {path: _filled(source.read_text(encoding="utf-8"), role, name) for path, source in sources.items()}
    return {**files, f"{package}/__init__.py": f'"""{role.capitalize()} `{name}` for rlcore."""\n'}


def _filled(text: str, role: Role, name: str) -> str:
    """A template in which the placeholders are replaced, those that others are part of first."""
    keys = {"sink": f'sinks.names = ["{name}"]', "execution": f'cluster.execution = "{name}"'}
    names = ", ".join(f'"{dependency}"' for dependency in DEPENDENCIES[role])
    replaced = {
        '"DEPENDENCIES"': names,
        "RECIPE_KEY": keys.get(role, f'{role}.name = "{name}"'),
        "DEMO_ARGUMENTS": DEMO.get(role, f"{role}.name=newplugin").replace("newplugin", name),
        "ROLE": role,
        "RoleConformance": f"{role.capitalize()}Conformance",
        "spi=(0, 0)": f"spi={SPI_VERSION}",
        "NewPlugin": class_name(name),
        "rlcore-newplugin": distribution_name(name),
        "rlcore_newplugin": import_name(name),
        "newplugin": name,
    }
    return re.sub("|".join(map(re.escape, replaced)), lambda found: replaced[found[0]], text)


def distribution_name(name: str) -> str:
    """Return the distribution name of a plugin's package."""
    return f"rlcore-{name.replace('_', '-')}"


def import_name(name: str) -> str:
    """Return the import name of a plugin's package."""
    return f"rlcore_{name}"


def class_name(name: str) -> str:
    """Return the class name of a plugin."""
    return "".join(part.capitalize() for part in name.split("_"))


def _name_problems(role: Role, name: str) -> Iterator[Problem]:
    from rlcore.installed import is_installed
    from rlcore.registry.discovery import discover

    if not NAME.fullmatch(name) or keyword.iskeyword(name) or name == "auto":
        expected = (
            "lower-case letters, digits and single underscores, beginning with a letter, and no word of Python's or 'auto'"
        )
        yield Problem(path="NAME", found=repr(name), expected=expected)
        return
    if keyword.iskeyword(class_name(name)) or class_name(name) in _names_used(role):
        found = f"{name!r}, whose class would be {class_name(name)}, which its code uses for something else"
        yield Problem(path="NAME", found=found, expected="another name")
    taken = {entry.name: entry.distribution for entry in discover().of(role)}
    if name in taken:
        found = f"{name!r}, the {role} of {taken[name]}, which is installed"
        yield Problem(path="NAME", found=found, expected="a name that no installed plugin of the role has")
    elif is_installed(import_name(name)):
        found = f"{name!r}, whose package would be {import_name(name)}, which is installed"
        yield Problem(path="NAME", found=found, expected="a name of a package that is not there yet")


def _names_used(role: Role) -> set[str]:
    """Return the names in the code of a role's template, imports included."""
    nodes = list(ast.walk(ast.parse((TEMPLATES / role / "backend.py").read_text(encoding="utf-8"))))
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.id for node in nodes if isinstance(node, ast.Name)}


def _folder_problems(folder: Path) -> Iterator[Problem]:
    if folder.exists() or folder.is_symlink():
        yield Problem(path="--directory", found=f"{folder}, which exists", expected="a folder to be made: name another one")
