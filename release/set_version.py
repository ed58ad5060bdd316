"""Write a version into every package, and the range that fits it where one requires another: `release/set_version.py 0.2.0`."""

import argparse
import re
from pathlib import Path

from packages import ROOT, packages
from packaging.version import InvalidVersion, Version

_VERSION = re.compile(r'^(version|__version__) = "[^"]+"$', re.MULTILINE)
_REQUIREMENT = re.compile(r'"(rlcore(?:-[\w-]+)?)(\[[\w,]+\])?[<>=!~][^"]*"')


def set_version(version: Version, root: Path = ROOT) -> list[Path]:
    """The files that hold it now."""
    fits = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    projects = [root / one.folder / "pyproject.toml" for one in packages(root)]
    for path in projects:
        text = _one_version(path, version)
        path.write_text(_REQUIREMENT.sub(lambda match: f'"{match[1]}{match[2] or ""}{fits}"', text))
    module = root / "core/src/rlcore/__init__.py"
    module.write_text(_one_version(module, version))
    return [*projects, module]


def _one_version(path: Path, version: Version) -> str:
    text, count = _VERSION.subn(rf'\1 = "{version}"', path.read_text())
    if count != 1:
        raise SystemExit(f"{path} states its version {count} times; expected one line such as version = {str(version)!r}")
    return text


def version_of(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a version such as 0.2.0 or 0.2.0rc1") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("version", type=version_of)
    for path in set_version(parser.parse_args().version):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
