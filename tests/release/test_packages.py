"""The lists of packages: a new folder below plugins/ is in each of them, and what the repository repeats of them is current."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import import_contracts
import packages
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "plugins/acme_environment"
PROJECT = """
[project]
name = "rlcore-acme"
description = "An environment for rlcore: anvils"
dependencies = ["rlcore>=0.1,<0.2"]

[project.entry-points."rlcore.environments"]
anvils = "rlcore_acme:ANVILS"

[tool.hatch.build.targets.wheel]
packages = ["src/rlcore_acme"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository's files about packages, with a package more."""
    shutil.copytree(ROOT / "release", tmp_path / "release", ignore=shutil.ignore_patterns("__pycache__"))
    files = [ROOT / name for name in ("Makefile", "pyproject.toml", packages.PUBLISHED, *packages.DOCUMENTS)]
    files += ROOT.glob("requirements-*.txt")
    for path in (*files, *(ROOT / one.folder / "pyproject.toml" for one in packages.packages())):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return with_package(tmp_path)


def with_package(root: Path, settings: str = "") -> Path:
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    (root / FOLDER / "pyproject.toml").write_text(PROJECT + settings)
    return root


def test_what_the_repository_repeats_of_its_packages_is_current() -> None:
    for path, text in packages.written().items():
        assert (ROOT / path).read_text() == text, f"{path} differs from the packages: run make docs"


CORE_EXTRAS = tomllib.loads((packages.ROOT / "core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_extras_of_released_plugins_exist() -> None:
    for one in packages.packages():
        assert set(one.settings.get("extras", {})) <= {name for _, name in one.plugins()}
        own = one.project.get("optional-dependencies", {})
        assert set(one.settings.get("extras", {}).values()) <= {*own, *(f"rlcore[{name}]" for name in CORE_EXTRAS)}


def test_a_new_folder_is_in_every_list(checkout: Path) -> None:
    assert FOLDER in packages.folders(checkout)
    assert f"{FOLDER}/src" not in packages.checked(checkout)
    assert "rlcore-acme" in packages.image(checkout)
    texts = packages.written(checkout)
    assert "environment `anvils` | An environment for rlcore: anvils |" in texts["README.md"]
    assert f"| `{FOLDER}/` | `rlcore-acme` | `rlcore_acme` | environment `anvils` |" in texts["docs/design.md"]
    assert 'anvils = "rlcore-acme"\n' in texts[packages.PUBLISHED]
    assert packages.write(checkout) == list(texts)
    assert {path: (checkout / path).read_text() for path in texts} == texts


@pytest.mark.parametrize("target", ["lint", "setup-dev"])
def test_a_new_folder_is_in_the_makefile(checkout: Path, target: str) -> None:
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", target]
    printed = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True, timeout=60).stdout
    installs = next(line for line in printed.splitlines() if "-e ./torchkit" in line and "plugins/dpo" in line)
    assert f"-e ./{FOLDER} " in installs
    assert target == "setup-dev" or f" {FOLDER} " in next(line for line in printed.splitlines() if "deptry" in line)


@pytest.mark.parametrize(
    ("settings", "plain", "wing_forbids", "between"),
    [
        ("", True, None, []),
        ('[tool.rlcore]\nimports = ["rlcore.run"]\n', False, ("rlcore.config", "rlcore.run"), []),
        ('[tool.rlcore]\nimports = ["rlcore.config.load"]\n', False, ("rlcore.config", ""), []),
        ('[tool.rlcore]\nimports = ["rlcore_grpo"]\n', True, None, ["rlcore_acme -> rlcore_grpo"]),
    ],
)
def test_contracts_of_a_new_folder(
    checkout: Path, settings: str, plain: bool, wing_forbids: tuple[str, str] | None, between: list[str]
) -> None:
    shutil.copytree(ROOT / "core" / "src", checkout / "core" / "src", dirs_exist_ok=True)
    configuration = import_contracts.configuration(with_package(checkout, settings))
    contracts = {contract["name"].partition(",")[0]: contract for contract in configuration["contracts"]}
    assert "rlcore_acme" in configuration["root_packages"]
    assert "rlcore_acme" in contracts["The core imports neither a plugin"]["forbidden_modules"]
    assert "rlcore_acme" in contracts["What plugins share builds on the interface alone"]["forbidden_modules"]
    assert ("rlcore_acme" in contracts["Plugins import the interface and torchkit"]["source_modules"]) is plain
    independent = contracts["Plugins import each other only where their pyproject.toml says so"]
    assert "rlcore_acme" in independent["modules"]
    assert [arrow for arrow in independent["ignore_imports"] if arrow in between] == between
    own = [contract for contract in contracts.values() if contract.get("source_modules") == ["rlcore_acme"]]
    assert len(own) == (wing_forbids is not None)
    if wing_forbids is not None:
        forbidden, allowed = wing_forbids
        assert forbidden in own[0]["forbidden_modules"]
        assert allowed not in own[0]["forbidden_modules"]
        assert f"{FOLDER}/src" in packages.checked(checkout)


def test_a_key_that_nothing_reads_is_refused(checkout: Path) -> None:
    with pytest.raises(SystemExit, match=r"\['import'\] below"):
        packages.packages(with_package(checkout, "[tool.rlcore]\nimport = []\n"))


def test_a_document_without_marks_is_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("# rlcore\n")
    with pytest.raises(SystemExit, match=r"README\.md lacks .*<!-- packages"):
        packages.written(checkout)


def test_the_laptop_has_the_demos_packages() -> None:
    assert {"core", "torchkit", "plugins/fsdp2_backend", "plugins/transformers_generation", "plugins/grpo"} < set(
        packages.laptop()
    )
    assert len(packages.laptop()) < len(packages.folders()) / 2
