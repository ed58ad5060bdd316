"""`make test-changed`: runs the tests that a change can reach, as `make test` would.

    python tests/changed.py [BASE] [-- options of pytest]

A change is what the checkout has and BASE (origin/main) has not, uncommitted and untracked files included. It reaches a test by
imports, by the names of plugins in recipes, and by FOLDERS, for files that nothing imports. `tests/policy` is always run.
Nearly all whole runs name some plugins, such as `grpo`: of these a change within plugins runs EVERYDAY.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
POLICY = "tests/policy"
EVERYTHING = ("tests/conftest.py", "tests/tiers.py", "requirements-dev.txt", "pyproject.toml")
"""Files that decide how all tests run."""
FOLDERS = {
    "README.md": ("tests/docs", "tests/release"),
    "CONTRIBUTING.md": ("tests/release",),
    "docs/": ("tests/docs", "tests/release"),
    "website/": ("tests/docs",),
    "mkdocs.yml": ("tests/docs",),
    "recipes/": ("tests/recipes", "tests/docs"),
    "demo/": ("tests/recipes", "tests/docs"),
    "benchmarks/": ("tests/benchmarks", "tests/docs"),
    "release/": ("tests/release",),
    "Makefile": ("tests/release",),
    "Containerfile": ("tests/release",),
    ".ci/": ("tests/release",),
    ".github/": ("tests/release",),
}
"""Folders of the tests of files that nothing imports, by how a path begins."""
WHOLE_RUNS = "tests/system"
EVERYDAY = tuple(f"{WHOLE_RUNS}/test_{name}.py" for name in ("cluster", "failing_runs", "kill_and_resume", "learning", "lora"))
"""Whole runs for a change within plugins that more than MOST files of them name."""
MOST = 15
AUTO = ("rlcore_fsdp2.provider", "rlcore_transformers.provider")
"""Plugins that a recipe gets on a CPU without naming any."""
COMMAND_LINE = "rlcore.cli.main"
NAMED = re.compile(r'\bname\s*=\s*\\?"?(\w+)|\[\w+\.(\w+)\]|\b\w+\.(\w+)\.\w+\s*=')
"""Names in a recipe or an override: `name = "grpo"`, `generator.name=vllm`, `[algorithm.grpo]`, `trainer.megatron.x=2`."""


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the paths that differ from where the checkout left BASE. SystemExit where git knows no such commit."""
    merge_base = _git(
        root, "merge-base", base, "HEAD", failure=f"git knows no {base!r}; expected a commit: make test-changed BASE=main"
    )
    tracked = _git(root, "diff", "--name-only", "--no-renames", merge_base.strip())
    return sorted({*tracked.splitlines(), *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()})


def _git(root: Path, *arguments: str, failure: str = "") -> str:
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=not failure)
    if result.returncode:
        raise SystemExit(failure)
    return result.stdout


class Graph:
    """Which files of a checkout import which."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._sources = {_module_of(path): path for path in self._files("core/src", "torchkit/src", "plugins/*/src")}
        self._tests = self._files("tests")
        self._helpers = {path.stem: path for path in self._tests if not path.stem.startswith(("test_", "conftest"))}
        self._plugins = dict(self._entry_points())
        self._importers: defaultdict[PurePosixPath, set[PurePosixPath]] = defaultdict(set)
        for path in (*self._sources.values(), *self._tests):
            for imported in self._imports(path):
                self._importers[imported].add(path)

    def reached_tests(self, changed: Sequence[str]) -> list[str]:
        """Return the test files, or folders of them, that a change of these paths can reach."""
        found, files = {POLICY}, {PurePosixPath(path) for path in changed}
        for path in changed:
            found.update(folder for start, folders in FOLDERS.items() if path.startswith(start) for folder in folders)
        if any(path in EVERYTHING for path in changed):
            return ["tests"]
        waiting = [*files, *(module for path in files for module in self._beside(path))]
        reached = set(waiting)
        while waiting:
            new = self._importers[waiting.pop()] - reached
            reached |= new
            waiting += new
        tests = {path for path in reached if path in self._tests and path.name.startswith("test_")}
        whole_runs = {path for path in tests if path.is_relative_to(WHOLE_RUNS)} - files
        is_within_plugins = all(path.startswith(("plugins/", "tests/")) and not path.startswith(WHOLE_RUNS) for path in changed)
        if len(whole_runs) > MOST and is_within_plugins:
            tests -= whole_runs - {PurePosixPath(path) for path in EVERYDAY}
        found.update(str(path) for path in tests if not any(path.is_relative_to(folder) for folder in found))
        return sorted(folder for folder in found if (self._root / folder).exists())

    def _files(self, *folders: str) -> set[PurePosixPath]:
        paths = (path for folder in folders for parent in self._root.glob(folder) for path in parent.rglob("*.py"))
        return {PurePosixPath(path.relative_to(self._root)) for path in paths}

    def _entry_points(self) -> Iterator[tuple[str, set[str]]]:
        """The modules that provide the plugins of a name."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for file in self._root.glob("plugins/*/pyproject.toml"):
            groups: Mapping[str, Mapping[str, str]] = tomllib.loads(file.read_text())["project"].get("entry-points", {})
            for name, value in (point for points in groups.values() for point in points.items()):
                found[name].add(value.partition(":")[0])
        yield from found.items()

    def _beside(self, path: PurePosixPath) -> set[PurePosixPath]:
        """The Python files that may read one that is none: those of its folder, or the first below a folder above it."""
        if path.suffix == ".py":
            return set()
        modules = {*self._sources.values(), *self._tests}
        below = ({module for module in modules if module.is_relative_to(folder)} for folder in path.parents if folder.parts)
        return {module for module in modules if module.parent == path.parent} or next(filter(None, below), set())

    def _imports(self, path: PurePosixPath) -> set[PurePosixPath]:
        """The files that one imports, or names as the module of a plugin."""
        text = (self._root / path).read_text(encoding="utf-8")
        names = set(_imported_names(ast.parse(text), _module_of(path)))
        is_test = path.parts[0] == "tests"
        if is_test:
            names.update(module for groups in NAMED.findall(text) for name in groups for module in self._plugins.get(name, ()))
            if COMMAND_LINE in names and path.parts[1] != "core":
                names.update(AUTO)
        found = {file for name in names for file in self._named(name, is_test)}
        if is_test:
            found.update(folder / "conftest.py" for folder in path.parents if folder.parts)
        return found & {*self._sources.values(), *self._tests} - {path}

    def _named(self, name: str, is_test: bool) -> Iterator[PurePosixPath]:
        """The file of a module, or of one that has an attribute of this name, and those of its packages."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if (module := ".".join(parts[:end])) in self._sources:
                yield self._sources[module]
        if parts[0] == "tests":
            yield from (PurePosixPath(*parts[:end]).with_suffix(".py") for end in range(2, len(parts) + 1))
        elif is_test and parts[0] in self._helpers:
            yield self._helpers[parts[0]]


def _module_of(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    inside = parts[parts.index("src") + 1 :] if "src" in parts and parts[0] != "tests" else parts
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def _imported_names(tree: ast.AST, module: str) -> Iterator[str]:
    """Modules, attributes that may be modules, and modules that a string names as plugins do: `package.module:NAME`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=name, names=aliases, level=level):
                start = ".".join(filter(None, [".".join(module.split(".")[: -level or None]) if level else "", name]))
                yield from (f"{start}.{alias.name}" for alias in aliases)
            case ast.Call(args=[ast.Constant(value=str(name)), *_], func=ast.Attribute(attr="import_module")):
                yield name
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+:\w+", text):
                yield text.partition(":")[0]


def main(arguments: Sequence[str]) -> int:
    """Run them; the exit code is pytest's."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    base, options = next(iter(arguments[:split]), "origin/main"), list(arguments[split + 1 :])
    tests = Graph().reached_tests(changed_files(base))
    print(f"what differs from {base} reaches: {' '.join(tests)}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
