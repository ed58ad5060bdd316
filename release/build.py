"""Build the source distribution and the wheel of every package, and their digests, into one folder: `release/build.py dist`.

The same commit gives the same bytes: hatchling orders members, sets their times to SOURCE_DATE_EPOCH and leaves owners and the
machine's modes out. All packages are built in this process, by hatchling itself, instead of in an environment for each.
"""

import argparse
import hashlib
import os
import subprocess
from contextlib import chdir
from pathlib import Path

from hatchling.build import build_sdist, build_wheel
from packages import ROOT, packages

EPOCH = "SOURCE_DATE_EPOCH"
DIGESTS = "SHA256SUMS"


def build(folders: list[Path], out: Path) -> list[Path]:
    """Both archives of each package, and SHA256SUMS of all."""
    out = out.absolute()  # hatchling builds in the folder of the package
    out.mkdir(parents=True, exist_ok=True)
    if left := sorted(path.name for path in out.iterdir()):
        raise SystemExit(
            f"{out} has files in it, such as {left[0]}; expected an empty folder, so that nothing old is published"
        )
    if EPOCH not in os.environ:  # images have no git
        os.environ[EPOCH] = commit_time()
    built = []
    for folder in folders:
        with chdir(folder):
            built += [out / build_sdist(str(out)), out / build_wheel(str(out))]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(built)]
    (out / DIGESTS).write_text("".join(lines))
    return built


def commit_time() -> str:
    """When the commit was made that is checked out, in seconds."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to write to; it has to be empty or new")
    for path in build([ROOT / one.folder for one in packages()], parser.parse_args().out):
        print(path)


if __name__ == "__main__":
    main()
