"""States of plugins: what is not usable takes no name, blocks no "auto", and is called the same everywhere."""

import pytest
from attrs import evolve, frozen

from rlcore.config.convert import convert
from rlcore.config.load import raw_from
from rlcore.registry.discovery import Entry, ObserverEntry, Registry
from rlcore.registry.selection import select
from rlcore.registry.states import entries_by_name, named_state, states_of
from rlcore.run.plan.choice import choose_plugins
from rlcore.run.plan.sections import sections, unchecked
from rlcore.spi import ROLES, ClusterConfig, ConfigError, PluginError
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_doctor.auto_choice import explain
from rlcore_doctor.plugins_command import plugins_json, plugins_lines

FAKES = {"trainer": FAKE_TRAINER, "generator": FAKE_GENERATOR, "algorithm": FAKE_ALGORITHM, "environment": FAKE_ENVIRONMENT}


@frozen(kw_only=True)
class OtherConfig:
    """A section with other keys than the fakes'."""

    elsewhere: int
    """Required."""


@frozen(kw_only=True)
class OtherCluster(ClusterConfig):
    """A section of an execution with other keys."""

    elsewhere: int
    """Required."""


def raising():
    raise OSError("driver library not found")


def entry(role, owner="acme", **changes):
    """An entry called "fake" of another distribution, with another config class."""
    config = OtherCluster if role == "execution" else OtherConfig
    provider = evolve(FAKES.get(role, FAKE_ALGORITHM), config=config, priority=90, **changes)
    return Entry(role=role, name="fake", distribution=owner, version="1.0").holding(provider)


def of_kind(kind, role):
    """A plugin in one of the states in which nothing can use it."""
    match kind:
        case "import":
            return Entry(
                role=role, name="fake", distribution="acme", version="1.0", error="import failed in acme, line 1: no x"
            )
        case "probe":
            return entry(role, unavailable=lambda: "x is not installed: pip install x")
        case "probe raises":
            return entry(role, unavailable=raising)
        case "module":
            return entry(role, backend="no_such_module:Backend")
        case "name":
            return entry(role, backend="rlcore.installed:Backend")
        case "interface":
            return entry(role, spi=(1, 0))
        case "description":
            return entry(role, backend="no path")
    return evolve(entry(role), disabled=True)


KINDS = {
    "import": "not usable: import failed in acme, line 1: no x",
    "probe": "not usable: x is not installed: pip install x",
    "probe raises": "not usable: its probe `unavailable` raised OSError: driver library not found",
    "module": "not usable: it names 'no_such_module:Backend', but there is no module 'no_such_module'",
    "name": "not usable: it names 'rlcore.installed:Backend', but rlcore.installed has no 'Backend'",
    "interface": "of another interface: written for SPI 1.0",
    "description": "not usable: backend is 'no path'",
    "disabled": "disabled",
}


def beside(role, *others):
    """The fakes, with others before and behind them."""
    registry = fake_registry()
    return evolve(registry, entries=(*others, *registry.entries, *others))


def raw(**tables):
    tables = {"model": {"path": "m"}, "algorithm": {"name": "fake"}, "environment": {"name": "fake"}} | tables
    return raw_from(tables, (), "a test")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", FAKES)
def test_what_is_not_usable_takes_no_name_and_blocks_nothing(role, kind):
    registry = beside(role, of_kind(kind, role))
    assert select(registry, role, "fake", device="cpu", needs={}).distribution == "in-process"
    if role in ("trainer", "generator"):
        assert select(registry, role, "auto", device="cpu", needs={}).distribution == "in-process"
    assert sections(registry)[role]["fake"] is FAKES[role].config
    assert "fake" not in unchecked(registry)[role]
    recipe = convert(raw(trainer={"name": "fake"}, generator={"name": "fake"}), sections(registry), unchecked(registry))
    assert choose_plugins(recipe, registry, "cpu").chosen[role].distribution == "in-process"


@pytest.mark.parametrize(("kind", "text"), KINDS.items())
@pytest.mark.parametrize("role", ROLES)
def test_each_state_is_called_the_same_everywhere(role, kind, text):
    registry = Registry(entries=(of_kind(kind, role),))
    with pytest.raises(PluginError) as raised:
        select(registry, role, "fake", device="cpu", needs={})
    headline, _, line = str(raised.value).splitlines()
    assert headline.startswith(f"{role} 'fake' is {text}")
    assert line.partition("): ")[2].startswith(text)
    (row,) = explain(registry, role, "cpu")
    name, _, reason = text.partition(": ")
    assert (row.kind, row.is_usable) == (name, False)
    listed = "\n".join(plugins_lines(registry, "cpu", 400))
    assert f"{name} (acme 1.0){f': {reason}' if reason else ''}" in listed
    (plain,) = plugins_json(registry, "cpu")["plugins"]
    assert plain["state"] == name
    section = "sinks" if role == "sink" else role
    named = {"names": ["fake"]} if role == "sink" else {"name": "fake"}
    if role != "execution" and kind not in (
        "probe",
        "probe raises",
        "module",
        "name",
    ):  # whose options are known, so that only the selection has something to say
        with pytest.raises(ConfigError) as refused:
            convert(raw(**{section: named, "run": {"num_stepz": 1}}), {section: {}} | sections(registry), unchecked(registry))
        assert f'"fake", which is {text}' in " ".join(problem.found for problem in refused.value.problems)


@pytest.mark.parametrize("role", ROLES)
def test_a_duplicate_names_both_packages_and_what_to_do_before_its_options_are_judged(role):
    own = evolve(entry(role, owner="rlcore-fakes"), version="2.0")
    broken = evolve(of_kind("import", role), distribution="broken")
    registry = Registry(entries=(entry(role), broken, own))
    duplicate = 'a duplicate name: acme 1.0 and rlcore-fakes 2.0 provide it; keep one: set plugins.disable = ["acme"]'
    with pytest.raises(PluginError) as raised:
        select(registry, role, "fake", device="cpu", needs={})
    assert str(raised.value).startswith(f"{role} 'fake' is {duplicate}")
    assert [row.kind for row in explain(registry, role, "cpu")] == ["a duplicate name", "not usable", "a duplicate name"]
    section = "sinks" if role == "sink" else role
    assert "fake" not in sections(registry)[section]
    assert unchecked(registry)[section]["fake"].startswith(duplicate)
    assert entries_by_name(registry.entries) == {}


def test_several_of_a_name_that_are_not_usable_are_all_told():
    states = states_of([of_kind("import", "sink"), of_kind("interface", "sink"), of_kind("disabled", "sink")])
    text = named_state(states, "fake").text
    assert text.startswith(
        "not usable: acme 1.0 is not usable: import failed in acme, line 1: no x; acme 1.0 is of another inter"
    )
    assert named_state(states, "other") is None


def test_observers_are_judged_as_plugins_are():
    watch = ObserverEntry(name="watch", distribution="acme", version="1.0")
    broken = evolve(watch, distribution="other", error="import failed")
    assert Registry(entries=(), observer_entries=(broken, watch)).observers(["watch"]) == (watch,)
    with pytest.raises(PluginError, match=r"'watch' is a duplicate name"):
        Registry(entries=(), observer_entries=(broken, watch, evolve(watch, distribution="third"))).observers(["watch"])
