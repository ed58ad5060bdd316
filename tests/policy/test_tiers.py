"""Marks choose the cases that `make test` leaves out. Tests that find planted faults always run."""

import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from ..tiers import cover, each_part, wide_items  # type: ignore[import-not-found]

SIZES = [("ranks", [1, 2, 4]), ("dtype", ["float32", "bfloat16"]), ("tied", [False, True]), ("model", ["a", "b", "c"])]


@frozen(eq=False)
class Item:
    """A tier's choice among the cases of a test."""

    nodeid: str
    mark: pytest.Mark | None = None
    callspec: Any = None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark if name == "wide" else None


@frozen
class Callspec:
    params: dict[str, Any]
    indices: dict[str, int]


def cases(**arguments: Any) -> list[Item]:
    """Cases of a marked function, one for each combination of SIZES."""
    found = []
    for indices in product(*(range(len(values)) for _, values in SIZES)):
        places = {name: index for (name, _), index in zip(SIZES, indices, strict=True)}
        params = {name: values[places[name]] for name, values in SIZES}
        name = f"tests/test_a.py::test[{'-'.join(map(str, params.values()))}]"
        found.append(Item(name, pytest.mark.wide(**arguments).mark, Callspec(params, places)))
    return found


def kept(items: list[Item], *killers: str) -> list[Item]:
    wide = wide_items(items, killers)
    return [item for item in items if item not in wide]


def test_a_mark_without_arguments_leaves_out_all_and_no_mark_nothing() -> None:
    others = [Item("tests/test_b.py::test"), Item("tests/test_b.py::test_other[1]")]
    assert kept([*cases(), *others]) == others


def test_cases_of_an_id_stay() -> None:
    names = ["1-float32-False-a", "4-bfloat16-True-c"]
    assert [item.nodeid for item in kept(cases(keep=names))] == [f"tests/test_a.py::test[{name}]" for name in names]
    with pytest.raises(pytest.UsageError, match="tests/test_a.py::test keeps \\['8-float32'\\]; expected ids"):
        kept(cases(keep=["8-float32"]))


def test_what_finds_a_planted_fault_stays() -> None:
    [found] = kept(cases(), "tests/test_a.py::test[2-float32-True-b]")
    assert found.nodeid == "tests/test_a.py::test[2-float32-True-b]"
    for name in ("tests/test_a.py::test", "tests/test_a.py"):
        assert len(kept(cases(), name)) == len(cases())


def test_a_sample_is_spread_over_all_and_always_the_same() -> None:
    [items] = {tuple(item.nodeid for item in kept(cases(sample=5))) for _ in range(2)}
    places = [item.nodeid for item in cases()]
    assert [places.index(name) for name in items] == [0, 7, 14, 21, 28]


def test_each_two_values_of_different_parameters_meet() -> None:
    found = kept(cases(pairwise=True))
    for one, other in combinations(SIZES, 2):
        met = {(item.callspec.params[one[0]], item.callspec.params[other[0]]) for item in found}
        assert met == set(product(one[1], other[1]))
    assert len(found) < len(cases()) / 2


def test_fields_of_a_record_are_parameters_too() -> None:
    records = [Callspec(*pair) for pair in product(({"a": 1}, {"a": 2}), ({"b": 1}, {"b": 2}))]
    mark = pytest.mark.wide(pairwise=True).mark
    items = [
        Item(f"tests/a.py::test[{place}]", mark, Callspec({"one": record}, {"one": place}))
        for place, record in enumerate(records)
    ]
    assert len(kept(items)) == 4, "each pair of fields"
    items = [Item(f"tests/a.py::test[{place}]", mark, Callspec({"one": place}, {"one": place})) for place in range(3)]
    assert kept(items) == items, "there is no second parameter"


def test_what_is_kept_already_is_not_covered_again() -> None:
    rows = list(product((("a", 0), ("a", 1)), (("b", 0), ("b", 1))))
    assert cover(rows, 1) == {0, 3}
    assert cover(rows, 1, [1]) == {1, 2}


def test_each_part_of_a_name_is_in_one() -> None:
    assert each_part(["tp2/qwen3/packed", "tp2/llama/packed", "pp2/qwen3/packed", "pp2/qwen3/unpacked"]) == [
        "tp2/qwen3/packed",
        "tp2/llama/packed",
        "pp2/qwen3/unpacked",
    ]


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "distributed"])
def test_what_passed_in_one_environment_is_left_out_in_another(options: tuple[str, ...], tmp_path: Path) -> None:
    folder = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((folder.parent / "conftest.py").read_text())
    (tmp_path / "support").symlink_to(folder.parent / "support")
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_passes(): pass\n"
        "def test_skips(): pytest.skip('has none')\n@pytest.mark.xfail\ndef test_not(): assert 0\n"
    )
    command = [sys.executable, "-m", "pytest", "-qp", "no:cacheprovider", *options]

    def run(option: str) -> str:
        return subprocess.run([*command, option, "noted"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "1 passed, 1 skipped, 1 xfailed" in run("--note-passed")
    assert (tmp_path / "noted").read_text() == "test_it.py::test_passes\n"
    later = run("--without")
    assert "1 xfailed" in later
    assert "passed" not in later
