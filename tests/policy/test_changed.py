"""`make test-changed`: the tests that a change reaches, in a small checkout."""

import subprocess
from pathlib import Path

import pytest

from ..changed import EVERYDAY, MOST, Graph, changed_files  # type: ignore[import-not-found]

FILES = {
    "core/src/rlcore/__init__.py": "",
    "core/src/rlcore/spi/__init__.py": "from rlcore.spi.batch import Batch",
    "core/src/rlcore/spi/batch.py": "class Batch: ...",
    "core/src/rlcore/run/loop.py": "def train():\n    from rlcore.spi import Batch",
    "core/src/rlcore/cli/main.py": "from rlcore.run import loop",
    "core/src/rlcore/cli/words.toml": "",
    "plugins/fast/pyproject.toml": '[project.entry-points."rlcore.trainers"]\nfast = "rlcore_fast.provider:PROVIDER"',
    "plugins/fast/src/rlcore_fast/__init__.py": "",
    "plugins/fast/src/rlcore_fast/provider.py": 'BACKEND = "rlcore_fast.backend:Backend"',
    "plugins/fast/src/rlcore_fast/backend.py": "from .weights import load",
    "plugins/fast/src/rlcore_fast/weights.py": "",
    "tests/conftest.py": "",
    "tests/policy/test_rules.py": "",
    "tests/docs/test_documents.py": "",
    "tests/core/conftest.py": "",
    "tests/core/run/test_loop.py": "from rlcore.run.loop import train",
    "tests/core/spi/test_batch.py": "from rlcore.spi.batch import Batch",
    "tests/core/numbers.json": "",
    "tests/core/test_numbers.py": "",
    "tests/fast/fast_support.py": "from rlcore_fast import weights",
    "tests/fast/test_steps.py": "from fast_support import step",
    "tests/system/system_support.py": "from rlcore.cli.main import cli",
    "tests/system/test_fast.py": 'from .system_support import run\nrun("trainer.name=fast")',
    "tests/system/test_recipe.py": 'from .system_support import run\nRECIPE = """[trainer.fast]\\nlayers = 2"""',
    "tests/system/test_others.py": "from .system_support import run\nfast = 1",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("plugins/fast/src/rlcore_fast/weights.py", "fast/test_steps system/test_fast system/test_recipe"),
        (
            "core/src/rlcore/spi/batch.py",
            "core/run/test_loop core/spi/test_batch system/test_fast system/test_others system/test_recipe",
        ),
        ("plugins/fast/pyproject.toml", "fast/test_steps system/test_fast system/test_recipe"),
        ("core/src/rlcore/run/loop.py", "core/run/test_loop system/test_fast system/test_others system/test_recipe"),
        ("core/src/rlcore/cli/words.toml", "system/test_fast system/test_others system/test_recipe"),
        ("tests/fast/fast_support.py", "fast/test_steps"),
        ("tests/core/run/test_loop.py", "core/run/test_loop"),
        ("tests/core/conftest.py", "core/run/test_loop core/spi/test_batch core/test_numbers"),
        ("tests/core/numbers.json", "core/run/test_loop core/spi/test_batch core/test_numbers"),
        ("tests/fast/test_that_is_gone.py", ""),
        ("LICENSE", ""),
    ],
)
def test_a_change_reaches_tests_by_imports_and_by_names_in_recipes(root: Path, changed: str, reached: str) -> None:
    expected = {"tests/policy", *(f"tests/{name}.py" for name in reached.split())}
    assert Graph(root).reached_tests([changed]) == sorted(expected)


def test_of_many_whole_runs_that_name_a_plugin_the_everyday_ones_run(root: Path) -> None:
    names = [*EVERYDAY, *(f"tests/system/test_{number}.py" for number in range(MOST))]
    for name in names:
        (root / name).write_text('RECIPE = "trainer.name=fast"\nfrom .system_support import run')
    plugin, support = "plugins/fast/src/rlcore_fast/weights.py", "tests/system/system_support.py"
    assert Graph(root).reached_tests([plugin]) == sorted([*EVERYDAY, "tests/fast/test_steps.py", "tests/policy"])
    assert {*names, "tests/system/test_fast.py"} < set(Graph(root).reached_tests([support]))
    assert set(names) < set(Graph(root).reached_tests([plugin, "core/src/rlcore/run/loop.py"]))


@pytest.mark.parametrize(
    ("changed", "reached"), [("docs/vllm.md", ["tests/docs", "tests/policy"]), ("tests/conftest.py", ["tests"])]
)
def test_files_that_nothing_imports_have_folders(root: Path, changed: str, reached: list[str]) -> None:
    assert Graph(root).reached_tests([changed]) == reached


def test_a_change_is_what_the_base_has_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    def commit(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("kept.py", "")
    git("checkout", "-b", "topic")
    commit("committed.py", "")
    git("checkout", "main")
    commit("of_main.py", "")
    git("checkout", "topic")
    (tmp_path / "kept.py").write_text("edited")
    (tmp_path / "untracked.py").write_text("")
    assert changed_files("main", tmp_path) == ["committed.py", "kept.py", "untracked.py"]
    with pytest.raises(SystemExit, match="git knows no 'origin/main'"):
        changed_files("origin/main", tmp_path)
