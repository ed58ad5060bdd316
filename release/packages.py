"""The packages of the checkout, read from their folders: core, torchkit, and each of plugins/*.

    release/packages.py folders   prints the folder of each package
    release/packages.py checked   prints the source folders that mypy checks: the core, torchkit, what it imports, and the wings
    release/packages.py laptop    prints the folders of what `pip install 'rlcore[laptop]'` brings
    release/packages.py image     prints the requirements that the GPU image installs
    release/packages.py write     rewrites what repeats the packages: tables in documents, the core's list of released plugins

A package says in its pyproject.toml, below [tool.rlcore], what its folder does not show:

    imports   modules that it imports besides those that every plugin may import: the core's, which make it a wing, or others'
    image     the extras that the GPU image installs; false where the image leaves the package out
    extras    the extra that a plugin needs, by the plugin's name: the package's own, or the core's as "rlcore[NAME]"
    install   what messages name to install it, in place of its own name: the core's extra that brings it
"""

import argparse
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/design.md")
"""Documents with a table of packages."""
BEGIN, END = "<!-- packages: make docs -->\n", "<!-- end of packages -->\n"
PUBLISHED = "core/src/rlcore/published_plugins.toml"
PUBLISHED_HEAD = """\
# The plugins that are released with this version of the core, by role and name, and what installs each. Messages about what
# is not installed read it, and nothing else does: any other plugin is used like these. A role's first is the one to begin with.
# `make docs` writes it from the packages.
"""
KEYS = {"imports", "image", "extras", "install"}


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution of the checkout."""

    folder: str
    module: str
    """The name that Python imports."""
    project: Mapping[str, Any]
    """`[project]` of its pyproject.toml."""
    settings: Mapping[str, Any]
    """`[tool.rlcore]` of its pyproject.toml."""

    @property
    def name(self) -> str:
        return str(self.project["name"])

    @property
    def imports(self) -> list[str]:
        """Modules that it imports besides those that every plugin may import."""
        return list(self.settings.get("imports", ()))

    @property
    def is_plugin(self) -> bool:
        return self.folder.startswith("plugins/")

    def plugins(self) -> Iterator[tuple[str, str]]:
        """Yield role and name of each plugin."""
        groups: Mapping[str, Mapping[str, str]] = self.project.get("entry-points", {})
        for group, names in groups.items():
            yield from ((group.removeprefix("rlcore.").removesuffix("s"), name) for name in names)

    def requirement(self, extras: list[str]) -> str:
        """Return what pip installs it by."""
        return f"{self.name}[{','.join(extras)}]" if extras else self.name


def packages(root: Path = ROOT) -> list[Package]:
    """Return the core, torchkit and the plugins, these by folder. SystemExit for a key of [tool.rlcore] that nothing reads."""
    plugins = sorted(path.parent for path in root.glob("plugins/*/pyproject.toml"))
    return [_read(folder, root) for folder in (root / "core", root / "torchkit", *plugins)]


def _read(folder: Path, root: Path) -> Package:
    file = folder / "pyproject.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    settings = tables.get("tool", {}).get("rlcore", {})
    if unknown := settings.keys() - KEYS:
        raise SystemExit(f"{file} has {sorted(unknown)} below [tool.rlcore]; expected some of {sorted(KEYS)}")
    (source,) = tables["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return Package(
        folder=folder.relative_to(root).as_posix(),
        module=source.removeprefix("src/"),
        project=tables["project"],
        settings=settings,
    )


def wings(found: list[Package]) -> list[Package]:
    """Return the plugins that build on more of the core than the interface, themselves or through a package that does."""
    modules = {"rlcore."}
    while True:
        wings = [one for one in found if one.is_plugin and any(name.startswith(tuple(modules)) for name in one.imports)]
        if {one.module for one in wings} <= modules:
            return wings
        modules |= {one.module for one in wings}


def folders(root: Path = ROOT) -> list[str]:
    """Return the folder of each package."""
    return [one.folder for one in packages(root)]


def checked(root: Path = ROOT) -> list[str]:
    """Return the source folders that mypy checks."""
    found = packages(root)
    shared = [name for one in found if not one.is_plugin for name in one.imports]
    return [f"{one.folder}/src" for one in found if not one.is_plugin or one.module in shared or one in wings(found)]


def laptop(root: Path = ROOT) -> list[str]:
    """Return the folders of the core, of what its extra `laptop` names, and of what these need."""
    found = packages(root)
    by_name = {one.name: one for one in found}
    names = {"rlcore"}
    waiting = list(by_name["rlcore"].project["optional-dependencies"]["laptop"])
    while waiting:
        name = _name_of(waiting.pop())
        if name in by_name and name not in names:
            names.add(name)
            waiting += by_name[name].project["dependencies"]
    return [one.folder for one in found if one.name in names]


def _name_of(requirement: str) -> str:
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return str(name)


def image(root: Path = ROOT) -> list[str]:
    """Return the requirement of each package of the GPU image."""
    extras = [(one, one.settings.get("image", [])) for one in packages(root)]
    return [one.requirement(names) for one, names in extras if names is not False]


def published(root: Path = ROOT) -> str:
    """Return the core's list of what other packages bring. Those of `laptop` come first."""
    first = laptop(root)
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for one in sorted((one for one in packages(root) if one.folder != "core"), key=lambda one: one.folder not in first):
        for role, name in one.plugins():
            if role == "architecture":  # a model names its family by itself
                continue
            extra = one.settings.get("extras", {}).get(name)
            requirement = one.settings.get("install") or one.requirement([])
            if extra:
                requirement = extra if extra.startswith("rlcore[") else one.requirement([extra])
            rows[role].append(f'{name} = "{requirement}"\n')
    return PUBLISHED_HEAD + "".join(f"\n[{role}]\n{''.join(lines)}" for role, lines in sorted(rows.items()))


def table(document: str, root: Path = ROOT) -> str:
    """Return a document's table of packages; README.md links to each and describes it."""
    rows = list(_rows(document == "README.md", root))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def _rows(is_readme: bool, root: Path) -> Iterator[tuple[str, ...]]:
    yield ("Folder", "Distribution", "Plugins", "Description") if is_readme else ("Folder", "Distribution", "Import", "Plugins")
    for one in packages(root):
        if is_readme:
            link = f"[{one.folder}/]({one.folder}/README.md)"
            yield link, f"`{one.name}`", _listed(one), str(one.project["description"])
        else:
            yield f"`{one.folder}/`", f"`{one.name}`", f"`{one.module}`", _listed(one)


def _listed(one: Package) -> str:
    """The plugins of a package by role; "" for those that have none, and for the core, whose commands are in docs/cli.md."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for role, name in one.plugins() if one.is_plugin else ():
        names[role].append(f"`{name}`")
    return "; ".join(f"{role} {', '.join(plugins)}" for role, plugins in names.items())


def with_table(document: str, root: Path = ROOT) -> str:
    """Return a document's text with the present table between its marks. SystemExit where it has no marks."""
    before, *rest = (root / document).read_text(encoding="utf-8").split(BEGIN)
    if len(rest) != 1 or rest[0].count(END) != 1:
        raise SystemExit(f"{document} lacks the lines {BEGIN.strip()} and {END.strip()}, or has them twice; expected each once")
    return before + BEGIN + table(document, root) + END + rest[0].split(END)[1]


def written(root: Path = ROOT) -> dict[str, str]:
    """Return the present text of each file that repeats the packages, by its path."""
    return {**{document: with_table(document, root) for document in DOCUMENTS}, PUBLISHED: published(root)}


def write(root: Path = ROOT) -> list[str]:
    """Rewrite these files, and return their paths."""
    texts = written(root)
    for path, text in texts.items():
        (root / path).write_text(text, encoding="utf-8")
    return list(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lists = {function.__name__: function for function in (folders, checked, laptop, image, write)}
    parser.add_argument("list", choices=lists)
    print(" ".join(lists[parser.parse_args().list]()))


if __name__ == "__main__":
    main()
