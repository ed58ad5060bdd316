"""Selection: the named plugin or none; under "auto" the highest usable priority; every error lists what is installed."""

import pickle
import sys

import attrs
import pytest

from rlcore.registry.discovery import Registry, discover
from rlcore.registry.selection import ChosenPlugin, load_chosen, passed_over, select
from rlcore.spi import SPI_VERSION, PluginError, capabilities


def registry_of(*providers, role="trainer"):
    return Registry.from_providers({role: list(providers)})


def chosen(registry, name="auto", device="cpu", needs=None, role="trainer", dtype=None):
    return select(registry, role, name, device=device, needs=needs or {}, dtype=dtype).name


def refusal(registry, name="auto", device="cpu", needs=None, role="trainer"):
    with pytest.raises(PluginError) as raised:
        select(registry, role, name, device=device, needs=needs or {})
    return str(raised.value)


def test_auto_takes_the_highest_priority(make_provider):
    registry = registry_of(
        make_provider("low", priority=10), make_provider("high", priority=30), make_provider("mid", priority=20)
    )
    assert chosen(registry) == "high"


def test_auto_passes_over_what_is_unavailable(make_provider):
    absent = make_provider("high", priority=30, unavailable=lambda: "needs a GPU")
    assert chosen(registry_of(absent, make_provider("low"))) == "low"


def test_auto_passes_over_what_lacks_a_capability(make_provider):
    bare = make_provider("high", priority=30, capabilities=())
    assert chosen(registry_of(bare, make_provider("low")), needs={"entropy": "the loss has an entropy bonus"}) == "low"


def test_a_dtype_that_a_plugin_does_not_have_is_refused(make_provider):
    registry = registry_of(make_provider("numpy", priority=30, dtypes={"float32", "float16"}), make_provider("low"))
    assert chosen(registry, dtype="float16") == "numpy"
    assert chosen(registry, dtype="bfloat16") == "low"
    with pytest.raises(PluginError, match=r"bfloat16 \(model.dtype\), only in float16, float32"):
        select(registry, "trainer", "numpy", device="cpu", needs={}, dtype="bfloat16")
    taken = select(registry, "trainer", "auto", device="cpu", needs={}, dtype="bfloat16")
    (told,) = passed_over(registry, taken, device="cpu", needs={}, dtype="bfloat16")
    assert told.endswith(
        "as 'numpy' (priority 30) cannot be: does not compute in bfloat16 (model.dtype), only in float16, float32"
    )


def test_several_ranks_are_asked_of_those_alone_that_declare_them(make_provider):
    needs = {capabilities.MULTI_RANK: "[cluster] has 2 ranks"}
    registry = registry_of(
        make_provider("single", priority=30, capabilities=()),
        make_provider("several", priority=20, capabilities={capabilities.MULTI_RANK}),
    )
    assert chosen(registry, needs=needs) == "several"
    with pytest.raises(PluginError, match=r"'multi_rank' \(\[cluster\] has 2 ranks\)"):
        select(registry, "trainer", "single", device="cpu", needs=needs)


def test_what_auto_could_not_take_is_told_with_the_reason_highest_first(make_provider):
    registry = registry_of(
        make_provider("lower", priority=10, unavailable=lambda: "is not installed"),
        make_provider("taken", priority=50),
        make_provider("bare", priority=60, capabilities=()),
        make_provider("absent", priority=80, unavailable=lambda: "is not installed: pip install it"),
        make_provider("elsewhere", priority=90, devices=["cuda"]),
    )
    needs = {"entropy": "the loss has an entropy bonus"}
    taken = select(registry, "trainer", "auto", device="cpu", needs=needs)
    assert passed_over(registry, taken, device="cpu", needs=needs) == (
        "trainer 'taken' (priority 50) is taken, as 'absent' (priority 80) cannot be: is not installed: pip install it",
        "trainer 'taken' (priority 50) is taken, as 'bare' (priority 60) cannot be: "
        "lacks the capability 'entropy' (the loss has an entropy bonus)",
    )


def test_of_what_the_user_disabled_nothing_is_told(make_provider):
    registry = registry_of(make_provider("taken"), make_provider("off", priority=80, unavailable=lambda: "is broken"))
    entries = [attrs.evolve(entry, disabled=entry.name == "off") for entry in registry.entries]
    registry = attrs.evolve(registry, entries=tuple(entries))
    taken = select(registry, "trainer", "auto", device="cpu", needs={})
    assert passed_over(registry, taken, device="cpu", needs={}) == ()


def test_auto_considers_only_what_is_meant_for_the_device(make_provider):
    registry = registry_of(make_provider("big", priority=80, devices=["cuda"]), make_provider("small", priority=20))
    assert chosen(registry, device="cpu") == "small"
    assert chosen(registry, device="cuda") == "big"


def test_naming_runs_a_plugin_on_a_device_it_is_not_meant_for(make_provider):
    registry = registry_of(make_provider("big", priority=80, devices=["cuda"]), make_provider("small"))
    assert chosen(registry, "big", device="cpu") == "big"


def test_a_tie_at_the_top_is_an_error_that_names_both(make_provider):
    message = refusal(registry_of(make_provider("one", priority=5), make_provider("two", priority=5), make_provider("three")))
    assert "trainer 'one' (in-process 0) and trainer 'two' (in-process 0) tie at priority 5; name one of them" in message
    assert message.count("\n  - ") == 3


def test_a_tie_below_the_top_is_none(make_provider):
    registry = registry_of(make_provider("one", priority=5), make_provider("two", priority=5), make_provider("top", priority=6))
    assert chosen(registry) == "top"


def test_a_tie_is_broken_by_naming(make_provider):
    assert chosen(registry_of(make_provider("one"), make_provider("two")), "two") == "two"


def test_a_named_plugin_never_falls_back(make_provider):
    registry = registry_of(
        make_provider("absent", unavailable=lambda: "needs 8 GPUs; use a larger machine"), make_provider("present")
    )
    message = refusal(registry, "absent")
    assert message.startswith("trainer 'absent' is not usable: needs 8 GPUs; use a larger machine")
    assert "\n  - present (in-process 0, priority 0): usable" in message


def test_a_missing_capability_gives_the_recipes_reason(make_provider):
    registry = registry_of(make_provider("bare", capabilities=()))
    message = refusal(registry, "bare", needs={"top_k": "rollout.top_k is 20"})
    assert "lacks the capability 'top_k' (rollout.top_k is 20)" in message


def test_an_unknown_name_lists_what_is_installed_and_suggests(make_provider):
    message = refusal(registry_of(make_provider("swift"), make_provider("steady", priority=3)), "swfit")
    assert message.splitlines() == [
        "trainer 'swfit' is not installed. Did you mean \"swift\"?",
        "Installed trainers:",
        "  - swift (in-process 0, priority 0): usable",
        "  - steady (in-process 0, priority 3): usable",
    ]


@pytest.mark.parametrize("name", ["auto", "swift"])
def test_nothing_installed_says_which_group_is_missing(name):
    assert "install a package with an entry point in rlcore.generators" in refusal(registry_of(), name, role="generator")


def test_nothing_usable_lists_every_reason(make_provider):
    registry = registry_of(
        make_provider("one", unavailable=lambda: "no driver"), make_provider("two", devices=["cuda"], priority=80)
    )
    message = refusal(registry)
    assert message.startswith("no usable trainer is installed for device cpu")
    assert "one (in-process 0, priority 0): not usable: no driver" in message
    assert "two (in-process 0, priority 80): meant for cuda, so 'auto' passes it over on cpu; it can be named" in message


def test_what_is_meant_for_no_device_has_to_be_named(make_provider):
    registry = registry_of(make_provider("one", devices=[], priority=90))
    assert "one (in-process 0, priority 90): has to be named" in refusal(registry)
    assert chosen(registry, "one") == "one"


@pytest.mark.parametrize("role", ["algorithm", "environment"])
def test_algorithms_and_environments_have_to_be_named(make_provider, role):
    registry = registry_of(make_provider("one"), role=role)
    assert f"the {role} has to be named" in refusal(registry, role=role)
    assert chosen(registry, "one", role=role) == "one"


def raising():
    raise OSError("driver library not found")


def leaving():
    raise SystemExit(0)


async def asynchronous():
    return None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("probe", [raising, leaving, asynchronous, lambda: False, lambda: ""])
def test_a_broken_probe_is_a_reason_and_blocks_no_other(make_provider, probe):
    registry = registry_of(make_provider("odd", unavailable=probe), make_provider("good", priority=5))
    assert "trainer 'odd' is not usable: its probe `unavailable` r" in refusal(registry, "odd")
    assert chosen(registry, "good") == "good"
    assert chosen(registry) == "good"


@pytest.fixture
def with_broken(installer):
    """A good trainer beside one that cannot be imported."""
    installer.trainer("good", priority=10)
    installer.add("acme-broken", {"rlcore.trainers": {"broken": "broken_one:PROVIDER"}}, broken_one="import no_such_library\n")
    return installer


def test_under_auto_an_import_error_is_passed_over_and_told(with_broken):
    registry = discover()
    taken = select(registry, "trainer", "auto", device="cpu", needs={})
    assert taken.name == "good"
    (told,) = passed_over(registry, taken, device="cpu", needs={})
    assert told.startswith("trainer 'good' (priority 10) is taken, as 'broken' (acme-broken 1.0) cannot be: import failed in ")
    assert told.endswith("No module named 'no_such_library'")
    assert "broken (acme-broken 1.0): not usable: import failed in broken_one" in refusal(registry, "other")


def test_naming_another_or_disabling_it_makes_a_broken_plugin_harmless(with_broken):
    assert chosen(discover(), "good") == "good"
    assert chosen(discover(disable=["broken"])) == "good"
    assert "trainer 'broken' is not usable: import failed" in refusal(discover(), "broken")
    assert "trainer 'broken' is disabled" in refusal(discover(disable=["broken"]), "broken")


def test_another_interface_is_passed_over_under_auto_and_told(installer):
    installer.trainer("good")
    installer.trainer("old", spi=(0, 3), priority="high")
    registry = discover()
    taken = select(registry, "trainer", "auto", device="cpu", needs={})
    why = f"of another interface: written for SPI 0.3, but this rlcore has SPI {SPI_VERSION[0]}.{SPI_VERSION[1]}"
    (told,) = passed_over(registry, taken, device="cpu", needs={})
    assert told.startswith(f"trainer 'good' (priority 0) is taken, as 'old' (acme-old 1.0) cannot be: it is {why}")
    assert f"trainer 'old' is {why}" in refusal(registry, "old")


@pytest.fixture
def with_duplicate(installer):
    installer.trainer("twin", "acme-one", priority=10)
    installer.trainer("twin", "acme-two", priority=20)
    installer.trainer("other", priority=5)
    return installer


@pytest.mark.parametrize("name", ["auto", "twin"])
def test_a_duplicate_name_is_an_error_that_names_both_distributions(with_duplicate, name):
    message = refusal(discover(), name)
    assert "'twin' is a duplicate name: acme-one 1.0 and acme-two 1.0 provide it" in message
    assert 'keep one: set plugins.disable = ["acme-two"] or RLCORE_DISABLE_PLUGINS=acme-two, or uninstall the other' in message
    assert message.count("\n  - ") == 3


def test_a_duplicate_that_auto_would_not_take_blocks_nothing(installer):
    installer.trainer("twin", "acme-one", priority=10)
    installer.trainer("twin", "acme-two", priority=20, devices=["cuda"])
    installer.trainer("best", priority=15)
    assert chosen(discover()) == "best"
    assert "'auto' chooses no trainer: 'twin' is a duplicate name" in refusal(discover(), device="cuda")


def test_a_duplicate_name_is_resolved_by_disabling_a_distribution(with_duplicate):
    entry = select(discover(disable=["acme-two"]), "trainer", "twin", device="cpu", needs={})
    assert entry.distribution == "acme-one"
    assert chosen(discover(disable=["acme-two"])) == "twin"
    assert chosen(discover(), "other") == "other"


def test_a_worker_loads_what_the_driver_chose_and_nothing_else(with_broken):
    selected = select(discover(), "trainer", "good", device="cpu", needs={})
    travelled = pickle.loads(pickle.dumps(ChosenPlugin.of(selected)))
    sys.modules.pop("broken_one", None)
    entry = load_chosen(travelled)
    assert "broken_one" not in sys.modules
    assert (entry.name, entry.error) == ("good", None)
    assert entry.provider.name == "good"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": "2.0"}, "the driver chose trainer 'swift' of acme-swift 2.0; this worker has version 1.0"),
        ({"distribution": "acme-fast"}, "this worker finds acme-swift 1.0 of that name"),
        ({"name": "gone"}, "this worker finds nothing of that name"),
        ({"role": "generator"}, "nothing of that name in rlcore.generators"),
    ],
)
def test_a_worker_with_other_packages_refuses(installer, change, text):
    installer.trainer("swift")
    plain = {"role": "trainer", "name": "swift", "distribution": "acme-swift", "version": "1.0"}
    with pytest.raises(PluginError) as raised:
        load_chosen(ChosenPlugin(**{**plain, **change}))
    assert text in str(raised.value)


def test_a_worker_in_which_the_plugin_is_broken_says_so(with_broken):
    with pytest.raises(PluginError, match="not usable: import failed"):
        load_chosen(ChosenPlugin(role="trainer", name="broken", distribution="acme-broken", version="1.0"))


def test_a_worker_takes_the_chosen_one_of_two_of_a_name(with_duplicate):
    chosen_plugin = ChosenPlugin(role="trainer", name="twin", distribution="acme-two", version="1.0")
    assert load_chosen(chosen_plugin).provider.priority == 20
