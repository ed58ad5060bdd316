"""Observers of the loop from other packages: found by their entry points, called by their paths, refused with the reason."""

import pytest

from rlcore.registry.discovery import discover
from rlcore.registry.run_parts import loop_observers
from rlcore.run.plan.sections import sections
from rlcore.spi import PluginError

DESCRIPTION = """
from rlcore.spi import LoopObserverProvider
FIELDS = {"name": "disk", "spi": (2, 0), "observer": "acme_disk:observe"}
DISK = LoopObserverProvider(**{**FIELDS, **FIELDS_HERE})
"""
CODE = """
def observe(run):
    return f"observes {run}"

def check(recipe):
    return [recipe]
"""


@pytest.fixture
def add(installer):
    """Installs a package with the observer `disk`; `fields` replace those of its description."""

    def add(distribution: str = "acme", **fields: object) -> None:
        module = f"{distribution}_described"
        modules = {module: DESCRIPTION.replace("FIELDS_HERE", repr(fields)), f"{distribution}_disk": CODE}
        installer.add(distribution, {"rlcore.loop_observers": {"disk": f"{module}:DISK"}}, **modules)

    return add


def disk():
    """The entry of the observer; those that this checkout has are there too."""
    (entry,) = [entry for entry in loop_observers(()) if entry.name == "disk"]
    return entry


def test_its_functions_are_called_with_the_argument(add) -> None:
    add(check="acme_disk:check")
    assert disk().call("observer", "a run") == "observes a run"
    assert disk().call("check", "a recipe") == ["a recipe"]


def test_one_without_a_check_finds_nothing(add) -> None:
    add()
    assert disk().call("check", "a recipe") is None


def test_one_with_the_name_of_a_section_is_refused(installer) -> None:
    config = "import attrs\n@attrs.frozen(kw_only=True)\nclass Own:\n    pass\n"
    code = config + DESCRIPTION.replace("FIELDS_HERE", "{'name': 'training', 'config': Own}")
    installer.add("acme", {"rlcore.loop_observers": {"training": "acme_described:DISK"}}, acme_described=code, acme_disk=CODE)
    with pytest.raises(PluginError) as error:
        sections(discover())
    assert "loop_observer 'training' (acme" in str(error.value)


def test_it_is_left_out_where_it_is_unwanted_or_disabled(add, monkeypatch) -> None:
    add()
    assert "disk" not in [entry.name for entry in loop_observers(["disk"])]
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "loop_observer:disk")
    assert "disk" not in [entry.name for entry in loop_observers(())]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"spi": (9, 0)}, "9.0"),
        ({"name": "disc"}, "expected one name"),
        ({"observer": "acme_disk"}, "expected 'package.module:name'"),
        ({"check": "acme_disk.check"}, "expected 'package.module:name'"),
        ({"observer": "acme_nowhere:observe"}, "acme_nowhere"),
        ({"config": 3}, "expected a frozen, keyword-only attrs class"),
    ],
)
def test_one_that_is_not_usable_is_refused_with_the_reason(add, fields: dict[str, object], reason: str) -> None:
    add(**fields)
    with pytest.raises(PluginError, match="RLCORE_DISABLE_PLUGINS") as raised:
        loop_observers(())
    assert reason in str(raised.value)
    assert "disk" not in [entry.name for entry in loop_observers(["disk"])]


def test_two_of_one_name_are_refused(add) -> None:
    add()
    add("other", observer="other_disk:observe")
    with pytest.raises(PluginError, match="duplicate"):
        loop_observers(())


def test_a_path_that_names_nothing_is_refused_when_it_is_called(add) -> None:
    add(observer="acme_disk:missing")
    with pytest.raises(PluginError, match="missing"):
        disk().call("observer", "a run")


@pytest.mark.parametrize("found", ["the disk is too small", 7])
def test_a_check_that_returns_anything_but_problems_is_refused(add, found: object) -> None:
    add(check="acme_disk:check")
    with pytest.raises(PluginError, match="its check returned"):
        disk().check(found)  # it returns them in a list
