"""Composition as hydra does it, and hydra itself where it is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ConfigError
from rlcore_import import hydra_files
from rlcore_import.hydra_files import read_hydra

FILES = {
    "main.yaml": """
defaults:
  - engine: dp
  - actor@a.actor: ${engine}_actor
  - rows
  - model@a.model: plain
  - critic@critic: ${engine}_critic
  - model@critic.model: plain
  - optional spare: none
  - _self_
n: 1
a: {actor: {own: 2}}
""",
    "older.yaml": "defaults: [main, override engine: big, _self_]\nn: 2\n",
    "oldest.yaml": "defaults: [older, override model@critic.model: large, override engine: dp]\n",
    "engine/dp.yaml": "# @package _global_\nengine: dp\n",
    "engine/big.yaml": "# @package _global_\nengine: big\n",
    "actor/common.yaml": "lr: 1\nown: 1\n",
    "actor/dp_actor.yaml": "defaults: [../optim@optim: adam, common, _self_]\nlr: 2\n",
    "actor/big_actor.yaml": "defaults: [../optim@optim: muon, common]\n",
    "critic/dp_critic.yaml": "defaults: [../optim@optim: adam]\nname: dp\n",
    "critic/big_critic.yaml": "name: big\n",
    "optim/adam.yaml": "betas: [0.9, 0.999]\n",
    "optim/muon.yaml": "momentum: 0.9\n",
    "model/plain.yaml": "size: 1\n",
    "model/large.yaml": "size: 2\n",
    "rows.yaml": "rows: {path: x}\n",
    "extra/more.yaml": "level: 3\n",
    "late.yaml": "defaults: [engine: dp, 'actor@a.actor': '${engine}_actor', optional trial: none, _self_]\n",
    "trial/big.yaml": "# @package _global_\ndefaults: [override /engine: big, _self_]\nn: 7\n",
    "outer.yaml": "defaults: [wrap@w: whole]\n",
    "wrap/whole.yaml": "defaults: [inner: plain]\n",
    "wrap/inner/plain.yaml": "x: 1\n",
    "wrap/inner/other.yaml": "x: 2\n",
}
PLAIN, ADAM = {"size": 1}, {"betas": [0.9, 0.999]}
DP: dict[str, Any] = {
    "engine": "dp",
    "a": {"actor": {"optim": ADAM, "lr": 2, "own": 2}, "model": PLAIN},
    "rows": {"path": "x"},
    "critic": {"optim": ADAM, "name": "dp", "model": PLAIN},
    "n": 1,
}
BIG: dict[str, Any] = {
    "engine": "big",
    "a": {"actor": {"optim": {"momentum": 0.9}, "lr": 1, "own": 2}, "model": PLAIN},
    "rows": {"path": "x"},
    "critic": {"name": "big", "model": PLAIN},
    "n": 1,
}
LARGE = {"size": 2}
CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("main", [], DP),
    ("main", ["engine=big"], BIG),
    ("older", [], {**BIG, "n": 2}),
    ("older", ["engine=dp"], {**DP, "n": 2}),
    ("oldest", [], {**DP, "n": 2, "critic": {**DP["critic"], "model": LARGE}}),
    ("main", ["model@critic.model=large"], {**DP, "critic": {**DP["critic"], "model": LARGE}}),
    ("main", ["~critic"], {**DP, "critic": {"model": PLAIN}}),
    ("main", ["~engine", "actor@a.actor=big_actor", "critic=big_critic"], {k: v for k, v in BIG.items() if k != "engine"}),
    ("main", ["+extra=more", "n=5", "+m=[1,2]", "~rows.path"], {**DP, "extra": {"level": 3}, "n": 5, "m": [1, 2], "rows": {}}),
    ("main", ["+extra@critic.e=more"], {**DP, "critic": {**DP["critic"], "e": {"level": 3}}}),
    ("main", ["+extra@_global_=more"], {**DP, "level": 3}),
    ("main", ["hydra.run.dir=/x", "hydra/job_logging=none", "m={k:1}"], {**DP, "m": {"k": 1}}),
    ("late", ["trial=big"], {"engine": "big", "a": {"actor": {"optim": {"momentum": 0.9}, "lr": 1, "own": 1}}, "n": 7}),
    ("outer", ["wrap/inner@w.inner=other"], {"w": {"inner": {"x": 2}}}),
]
WRONG = {
    "a choice that is not there": ("main", ["engine=other"]),
    "a group that nothing chooses": ("main", ["optim=adam"]),
    "a group to leave out that nothing chooses": ("main", ["~model"]),
    "a circle": ("circle", []),
    "an entry of two groups": ("two", []),
    "a group's file that is no YAML": ("main", ["engine=broken"]),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    wrong = {"circle.yaml": "defaults: [circle]\n", "two.yaml": "defaults: [{a: 1, b: 2}]\n", "engine/broken.yaml": "a: [\n"}
    for name, text in {**FILES, **wrong}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.fixture(params=["files", "hydra"] if find_spec("hydra") else ["files"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composition by the files, and by hydra."""
    if request.param == "files":
        monkeypatch.setattr(hydra_files, "find_spec", lambda name: None)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(("name", "overrides", "expected"), CASES)
def test_groups_compose(files: Path, name: str, overrides: list[str], expected: dict[str, Any]) -> None:
    assert read_hydra(files / f"{name}.yaml", overrides) == expected


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(("name", "overrides"), WRONG.values(), ids=WRONG)
def test_what_does_not_compose_is_refused(files: Path, name: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"\.yaml: found"):
        read_hydra(files / f"{name}.yaml", overrides)


def test_a_search_path_behind_the_file(files: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "engine"
    other.mkdir(parents=True)
    (other / "new.yaml").write_text("# @package _global_\nengine: dp\n")
    overrides = [f"hydra.searchpath=[file://{other.parent}]", "engine=new", "actor@a.actor=dp_actor", "critic=dp_critic"]
    assert read_hydra(files / "main.yaml", overrides) == DP


def test_groups_lie_in_hydras_search_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's recipes outside its package have a search path relative to the folder in which their script starts."""
    library, own = tmp_path / "library" / "config", tmp_path / "examples" / "run.yaml"
    (library / "actor").mkdir(parents=True)
    own.parent.mkdir()
    (library / "base.yaml").write_text("defaults: [actor@a.actor: big, _self_]\nn: 1\nm: 2\n")
    (library / "actor" / "big.yaml").write_text("x: 1\n")
    for place in ("file://library/config", "pkg://library.config", f"file://{library}"):
        own.write_text(f"hydra: {{searchpath: ['{place}']}}\ndefaults: [base, _self_]\nn: 3\n")
        assert read_hydra(own) == {"a": {"actor": {"x": 1}}, "n": 3, "m": 2}
    own.write_text("hydra: {searchpath: ['file://elsewhere']}\ndefaults: [base]\n")
    with pytest.raises(ConfigError, match=r"(base|run)\.yaml: found"):
        read_hydra(own)


def test_groups_go_where_hydra_puts_them(tmp_path: Path) -> None:
    """A group goes to the table of its name unless its entry or its file names another; an optional one may be missing."""
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "big.yaml").write_text("x: 1\n")
    (tmp_path / "actor" / "all.yaml").write_text("# @package _global_\ny: 2\n")
    (tmp_path / "run.yaml").write_text(
        "defaults: [actor: big, optional actor@c: none, actor@b: big, override hydra/job_logging: none]\nz: 3\n"
    )
    assert read_hydra(tmp_path / "run.yaml") == {"actor": {"x": 1}, "b": {"x": 1}, "z": 3}
    (tmp_path / "run.yaml").write_text("defaults: [actor: all]\n")
    assert read_hydra(tmp_path / "run.yaml") == {"y": 2}


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(
    ("entry", "head", "expected"),
    [
        ("/inner: one", "b", {"a": {"y": 2}, "b": {"x": 1}}),
        ("/inner: one", "b.c", {"a": {"y": 2}, "b": {"c": {"x": 1}}}),
        ("/inner: one", "_global_.b", {"a": {"y": 2}, "b": {"x": 1}}),
        ("/inner/one", "b", {"a": {"y": 2}, "b": {"x": 1}}),
        ("/inner@d: one", "b", {"a": {"y": 2, "d": {"x": 1}}}),
        ("/inner@_here_: one", "b", {"a": {"y": 2, "x": 1}}),
    ],
)
def test_a_head_names_a_table_of_the_whole_and_an_entry_one_within_its_file(
    tmp_path: Path, entry: str, head: str, expected: dict[str, Any]
) -> None:
    for name, text in {"outer/o": f"defaults: [{entry}, _self_]\ny: 2\n", "inner/one": f"# @package {head}\nx: 1\n"}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text("defaults: [outer@a: o, _self_]\n")
    assert read_hydra(tmp_path / "run.yaml") == expected


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("override", ["part=[one,two]", "+part@part=[one, two]"])
def test_a_group_takes_several_names(tmp_path: Path, override: str) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.yaml").write_text("x: 1\n")
    (tmp_path / "part" / "two.yaml").write_text("y: 2\n")
    (tmp_path / "run.yaml").write_text(f"defaults: [{'' if override[0] == '+' else 'part: one, '}_self_]\n")
    assert read_hydra(tmp_path / "run.yaml", [override]) == {"part": {"x": 1, "y": 2}}
