"""Discovery through real package metadata: what is installed, and what is wrong with it."""

import sys
import time

import attrs
import pytest

from rlcore import time_limit
from rlcore.installed import installed_entry_points
from rlcore.registry.discovery import Registry, discover
from rlcore.registry.states import states_of
from rlcore.spi import ROLES, SPI_VERSION, PluginError


def only(registry, role="trainer"):
    (entry,) = registry.of(role)
    return entry


def test_a_good_plugin_is_found_with_name_distribution_and_version(installer):
    installer.trainer("swift", "acme-swift", "2.5", priority=40)
    entry = only(discover())
    assert (entry.role, entry.name, entry.distribution, entry.version) == ("trainer", "swift", "acme-swift", "2.5")
    assert entry.provider.priority == 40
    assert entry.error is None
    assert not entry.disabled


def test_every_role_has_its_group(installer):
    source = "from rlcore.spi import ClusterConfig, Provider\nimport attrs\n@attrs.frozen(kw_only=True)\n"
    source += "class C(ClusterConfig): pass\nP = Provider(name='x', spi=(2, 0), config=C, backend='m:B')\n"
    groups = {f"rlcore.{role}s": {"x": "all_roles:P"} for role in ROLES}
    installer.add("acme", groups, all_roles=source)
    registry = discover()
    assert [entry.role for entry in registry.entries if entry.name == "x"] == list(ROLES)
    assert all(entry.error is None for entry in registry.entries)


def test_the_order_does_not_depend_on_the_order_of_installation(installer):
    for name in ("zeta", "alpha", "mid"):
        installer.trainer(name)
    assert [entry.name for entry in discover().of("trainer")] == ["alpha", "mid", "zeta"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_library\n", ["ModuleNotFoundError", "no_such_library", "in broken_provider, line 1"]),
        ("\n\nraise RuntimeError('the licence has run out')\n", ["RuntimeError: the licence has run out", "line 3"]),
        ("import sys\nsys.exit('bye')\n", ["SystemExit: bye"]),
        ("\nraise KeyboardInterrupt\n", ["raised KeyboardInterrupt without Ctrl-C", "in broken_provider, line 2"]),
        ("class PanicException(BaseException): ...\nraise PanicException('in Rust')\n", ["PanicException: in Rust", "line 2"]),
        ("def broken(:\n", ["SyntaxError"]),
        ("OTHER = 1\n", ["AttributeError", "PROVIDER"]),
        ("from broken_helper import x\n", ["in broken_helper, line 2", "ZeroDivisionError"]),
        ("PROVIDER = {'name': 'broken'}\n", ["a dict", "rlcore.spi.Provider"]),
        ("from rlcore.spi import Provider as PROVIDER\n", ["the class Provider", "an instance of"]),
    ],
)
def test_what_cannot_be_imported_says_what_failed_and_where(installer, source, expected):
    entry_points = {"rlcore.trainers": {"broken": "broken_provider:PROVIDER"}}
    installer.add("acme-broken", entry_points, broken_provider=source, broken_helper="\nx = 1 / 0\n")
    entry = only(discover())
    assert entry.provider is None
    for part in expected:
        assert part in entry.error


def test_a_missing_module_is_named(installer):
    installer.add("acme", {"rlcore.trainers": {"gone": "acme_gone.provider:PROVIDER"}})
    assert "acme_gone.provider:PROVIDER" in only(discover()).error


def test_a_malformed_entry_point_is_listed_and_does_not_stop_the_others(installer):
    installer.add("acme", {"rlcore.trainers": {"odd": "not a path"}})
    installer.trainer("good")
    entries = {entry.name: entry for entry in discover().of("trainer")}
    assert entries["good"].error is None
    assert entries["odd"].error == "the entry point names 'not a path'; expected package.module:attribute"


def test_what_an_import_prints_is_no_part_of_what_a_command_tells(installer, capsys):
    source = "print('hello from loud')\nraise ImportError('no more')\n"
    installer.add("acme", {"rlcore.trainers": {"loud": "loud_provider:PROVIDER"}}, loud_provider=source)
    assert "no more" in only(discover()).error
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "hello from loud\n")


def test_ctrl_c_in_an_import_is_no_defect_of_the_plugin(installer):
    source = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    installer.add("acme", {"rlcore.trainers": {"slow": "slow_provider:P"}}, slow_provider=source)
    with pytest.raises(KeyboardInterrupt):
        discover()


@pytest.mark.parametrize(
    ("spi", "text"),
    [
        ((SPI_VERSION[0] + 1, 0), "another major version; upgrade rlcore"),
        ((SPI_VERSION[0] - 1, 9), "another major version; upgrade the plugin"),
        ((SPI_VERSION[0], SPI_VERSION[1] + 1), "a newer minor version; upgrade rlcore"),
    ],
)
def test_another_spi_version_is_an_error_that_gives_both(installer, spi, text):
    installer.trainer("other", spi=spi)
    entry = only(discover())
    assert text in entry.error
    assert f"written for SPI {spi[0]}.{spi[1]}" in entry.error
    assert f"SPI {SPI_VERSION[0]}.{SPI_VERSION[1]}" in entry.error
    assert entry.provider is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capabilities": ["entropi"]}, "unknown capability 'entropi'; did you mean 'entropy'?"),
        ({"capabilities": ["zzzzzz"]}, "; known are "),
        ({"capabilities": [3]}, "capability 3 is not a string"),
        ({"config": dict}, "config is the class dict; expected a frozen, keyword-only attrs class"),
        ({"config": None}, "config is a NoneType"),
        ({"num_devices": 2}, "num_devices is a int; expected a function of the config that returns a number of devices"),
        ({"max_concurrent": 2}, "max_concurrent is a int; expected a function of the config that returns a number of calls"),
        ({"backend": "no colon"}, "backend is 'no colon'; expected 'package.module:name'"),
        ({"check": "x.y"}, "check is 'x.y'"),
        ({"devices": ["tpu"]}, "devices are ['tpu']; expected some of ['cpu', 'cuda']"),
        ({"dtypes": []}, "dtypes are []"),
        ({"dtypes": ["float8"]}, "dtypes are ['float8']; expected some of ['bfloat16', 'float16', 'float32', 'float64']"),
        ({"priority": "high"}, "priority is 'high'; expected an integer"),
        ({"priority": True}, "priority is True"),
        ({"spi": (1, 0, 0)}, "spi is (1, 0, 0)"),
        ({"spi": "1.0"}, "spi is '1.0'"),
        ({"unavailable": None}, "unavailable is a NoneType"),
    ],
)
def test_a_wrong_description_is_an_error(make_provider, options, text):
    registry = Registry.from_providers({"trainer": [make_provider(**options)]})
    assert text in only(registry).error


@pytest.mark.parametrize(("field", "found"), [("capabilities", "refit.in_process"), ("devices", "cpu"), ("dtypes", "float32")])
def test_a_string_in_place_of_a_set_is_one_error(make_provider, field, found):
    error = only(Registry.from_providers({"trainer": [make_provider(**{field: found})]})).error
    assert error == f"{field} are the string {found!r}; expected a set of names, such as {{{found!r}}}"


def test_a_name_that_differs_from_the_entry_points_is_an_error(installer):
    installer.trainer("mine", calls_itself="other")
    assert "calls itself 'other', its entry point 'mine'" in only(discover()).error


@attrs.define(kw_only=True)
class Mutable:
    size: int = 1


@attrs.frozen
class Positional:
    size: int = 1


@attrs.frozen(kw_only=True)
class Empty:
    pass


@pytest.mark.parametrize(
    ("config", "text"), [(Mutable, "is not frozen"), (Positional, "takes size by position"), (Empty, None)]
)
def test_config_classes_are_frozen_and_keyword_only(make_provider, config, text):
    error = only(Registry.from_providers({"trainer": [make_provider(config=config)]})).error
    assert (text in error) if text else error is None


def test_a_third_partys_own_capability_has_a_colon(make_provider):
    assert only(Registry.from_providers({"trainer": [make_provider(capabilities={"acme:speculative"})]})).error is None


def test_several_faults_are_reported_at_once(make_provider):
    provider = make_provider(priority=None, backend="", capabilities={"top_kk"})
    error = only(Registry.from_providers({"trainer": [provider]})).error
    assert all(part in error for part in ("priority", "backend", "did you mean 'top_k'?"))


@pytest.mark.parametrize("spec", ["noisy", "trainer:noisy", "Acme_Noisy", "acme-noisy"])
def test_a_disabled_plugin_is_not_even_imported(installer, spec):
    installer.add("acme-noisy", {"rlcore.trainers": {"noisy": "noisy_provider:PROVIDER"}}, noisy_provider="1 / 0")
    registry = discover(disable=[spec])
    entry = only(registry)
    assert entry.disabled
    assert entry.error is None
    assert entry.provider is None
    assert "noisy_provider" not in sys.modules
    assert registry.warnings == ()


def test_the_environment_variable_adds_to_the_recipe(installer, monkeypatch):
    for name in ("one", "two", "three"):
        installer.trainer(name)
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", " two , ,trainer:three")
    disabled = {entry.name for entry in discover(disable=["one"]).of("trainer") if entry.disabled}
    assert disabled == {"one", "two", "three"}


def test_a_role_limits_what_is_disabled(installer):
    installer.trainer("mine")
    registry = discover(disable=["generator:mine"])
    assert not only(registry).disabled
    assert len(registry.warnings) == 1


def test_a_name_to_disable_that_is_not_installed_is_a_warning_with_a_suggestion(installer):
    installer.trainer("swift")
    registry = discover(disable=["swiff"])
    assert registry.warnings == ("'swiff' is to be disabled, but no such plugin is installed; did you mean 'swift'?",)


OBSERVER = """
from rlcore.spi import hookimpl

class Watch:
    @hookimpl(wrapper=True)
    def train_step(self, request):
        return (yield)

WATCH = Watch()
"""


def test_observers_are_found_and_can_be_disabled(installer):
    installer.add("acme-watch", {"rlcore.observers": {"watch": "acme_watch:WATCH"}}, acme_watch=OBSERVER)
    registry = discover()
    assert [observer.label for observer in registry.observers(["watch"])] == ["observer 'watch' (acme-watch 1.0)"]
    assert discover(disable=["observer:watch"]).observers(()) == ()


def test_an_observer_is_in_use_only_where_it_is_named_or_global(installer):
    groups = {"rlcore.observers": {"watch": "acme_watch:WATCH"}, "rlcore.global_observers": {"guard": "acme_watch:WATCH"}}
    installer.add("acme-watch", groups, acme_watch=OBSERVER)
    registry = discover()
    assert registry.warnings == ()
    assert [(entry.name, entry.is_global) for entry in registry.observer_entries] == [("watch", False), ("guard", True)]
    assert [entry.name for entry in registry.observers(())] == ["guard"]
    assert [entry.name for entry in registry.observers(["watch", "guard"])] == ["watch", "guard"]
    assert [entry.name for entry in discover(disable=["guard"]).observers(["watch"])] == ["watch"]


def test_two_global_observers_of_one_name_are_an_error(installer):
    installer.add("acme-watch", {"rlcore.global_observers": {"watch": "acme_watch:WATCH"}}, acme_watch=OBSERVER)
    installer.add("other-watch", {"rlcore.global_observers": {"watch": "acme_watch:WATCH"}})
    with pytest.raises(PluginError, match=r"observer 'watch' .*acme-watch 1\.0 and other-watch 1\.0"):
        discover().observers(())
    assert len(discover(disable=["other-watch"]).observers(())) == 1


WITH_OPTIONS = """
from attrs import define, frozen
@frozen(kw_only=True)
class Options:
    figure: str = "loss"
class Watch:
    config = Options
    def __init__(self, context): pass
class Loose(Watch):
    @define
    class config:
        figure: str = "loss"
class Word(Watch):
    config = "figure"
"""


def test_a_class_of_observers_says_its_options(installer):
    points = {"watch": "Watch", "loose": "Loose", "word": "Word", "names": "Watch"}
    groups = {"rlcore.observers": {name: f"acme_opts:{found}" for name, found in points.items()}}
    installer.add("acme-watch", groups, acme_opts=WITH_OPTIONS)
    entries = {entry.name: entry for entry in discover().observer_entries}
    assert entries["watch"].error is None
    assert entries["watch"].config.__name__ == "Options"
    assert "config class Loose.config is not frozen" in entries["loose"].error
    assert "takes figure by position" in entries["loose"].error
    assert entries["word"].error == "config is a str; expected a frozen, keyword-only attrs class"
    assert entries["names"].error.startswith("'names' cannot be the name of an observer")
    assert entries["word"].config is None


def test_every_name_that_stands_for_no_observer_is_told(installer):
    installer.add("acme-watch", {"rlcore.observers": {"watch": "acme_watch:WATCH"}}, acme_watch=OBSERVER)
    installer.add("other-watch", {"rlcore.observers": {"watch": "acme_watch:WATCH"}})
    installer.add("acme-guard", {"rlcore.observers": {"guard": "acme_watch:WATCH"}})
    with pytest.raises(PluginError) as raised:
        discover(disable=["guard"]).observers(["watsch", "watch", "guard"])
    assert str(raised.value).splitlines()[1:] == [
        "  - observer 'watsch' is not installed; did you mean 'watch'?",
        "  - observer 'watch' is a duplicate name: acme-watch 1.0 and other-watch 1.0 provide it; keep one: "
        'set plugins.disable = ["other-watch"] or RLCORE_DISABLE_PLUGINS=other-watch, or uninstall the other',
        "  - observer 'guard' is disabled",
    ]


def test_a_broken_observer_is_an_error_where_it_is_named(installer):
    installer.add("acme-watch", {"rlcore.observers": {"watch": "acme_bad_watch:WATCH"}}, acme_bad_watch="1 / 0\n")
    with pytest.raises(PluginError, match=r"'watch' \(acme-watch 1.0\) is not usable: .* acme_bad_watch"):
        discover().observers(["watch"])
    assert discover().observers(()) == ()
    assert discover(disable=["watch"]).observers(()) == ()


def test_a_broken_global_observer_is_an_error_in_every_run(installer):
    installer.add("acme-watch", {"rlcore.global_observers": {"watch": "acme_bad_guard:WATCH"}}, acme_bad_guard="1 / 0\n")
    with pytest.raises(PluginError, match=r"'watch' \(acme-watch 1.0\) is not usable: .* acme_bad_guard"):
        discover().observers(())
    assert discover(disable=["watch"]).observers(()) == ()


def test_an_observer_whose_import_panics_is_its_own_error(installer):
    source = "class PanicException(BaseException): ...\nraise PanicException('in Rust')\n"
    installer.add("acme-watch", {"rlcore.observers": {"watch": "acme_panics:WATCH"}}, acme_panics=source)
    (entry,) = discover().observer_entries
    assert "import failed in acme_panics, line 2: PanicException: in Rust" in entry.error


def test_an_observer_that_is_none_is_an_error(installer):
    installer.add("acme-watch", {"rlcore.observers": {"watch": "acme_no_watch:WATCH"}}, acme_no_watch="WATCH = None\n")
    with pytest.raises(PluginError, match="names None"):
        discover().observers(["watch"])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("WATCH = object()", "no hooks; expected methods decorated"),
        (
            OBSERVER.replace("Watch()", "Watch"),
            "the entry point names the class Watch, which takes (); expected (context)",
        ),
        (OBSERVER.replace("self, request", "self"), "train_step: found train_step()"),
    ],
)
def test_an_observer_that_does_not_fit_is_an_error(installer, source, text):
    installer.add("acme-watch", {"rlcore.observers": {"watch": "acme_ill_watch:WATCH"}}, acme_ill_watch=f"{source}\n")
    with pytest.raises(PluginError) as raised:
        discover().observers(["watch"])
    assert f"'watch' (acme-watch 1.0) is not usable: {text}" in str(raised.value)


def test_an_unknown_group_of_ours_is_a_warning_with_a_suggestion(installer):
    installer.add(
        "acme", {"rlcore.trainer": {"mine": "acme:P"}, "rlcore.zzzzzz": {"x": "acme:P"}, "other.trainer": {"y": "acme:P"}}
    )
    near, far = discover().warnings
    assert near == "acme 1.0 has 'mine' in the unknown entry point group 'rlcore.trainer'; did you mean 'rlcore.trainers'?"
    assert "'rlcore.zzzzzz'; groups are rlcore.trainers, " in far


@pytest.mark.parametrize("name", ["name", "auto"])
def test_names_that_a_recipe_cannot_use_are_errors(installer, name):
    installer.trainer(name)
    assert f"'{name}' cannot be the name of a plugin" in only(discover()).error


@pytest.mark.parametrize("late", ["import time\ntime.sleep(60)\n", "import time\nwhile True:\n    time.monotonic()\n"])
def test_a_plugin_whose_import_does_not_end_is_named_and_stops_no_other(installer, monkeypatch, late):
    monkeypatch.setattr(time_limit, "LOAD_S", 0.3)
    installer.add("acme-late", {"rlcore.trainers": {"late": "late_provider:PROVIDER"}}, late_provider=late)
    installer.trainer("good")
    entries = {entry.name: entry for entry in discover().of("trainer")}
    assert entries["good"].error is None
    error = "import failed: the import of trainer 'late' (acme-late 1.0) took longer than 0.3 s (in late_provider, line "
    assert entries["late"].error.startswith(error)


PATHS = {
    "no_such_module.deep:T": "there is no module 'no_such_module'",
    "rlcore.absent:T": "there is no module 'rlcore.absent'",
    "sys.x:T": "there is no module 'sys.x'",
    "heavy_package.absent:T": "there is no module 'heavy_package.absent'",
    "heavy_package.backend:U": "heavy_package.backend has no 'U'",
    "heavy_package:T": "heavy_package has no 'T'",
    "rlcore.installed:Absent": "rlcore.installed has no 'Absent'",
    "heavy_package.backend:T": None,
    "rlcore.spi:Provider": None,
}


@pytest.mark.parametrize("field", ["backend", "check", "plan", "tool_parser"])
@pytest.mark.parametrize(("path", "fault"), PATHS.items())
def test_a_path_that_names_nothing_is_found_and_nothing_is_imported(make_provider, field, path, fault, tmp_path, monkeypatch):
    (tmp_path / "heavy_package").mkdir()
    (tmp_path / "heavy_package" / "__init__.py").write_text("1 / 0\n")
    (tmp_path / "heavy_package" / "backend.py").write_text("1 / 0\n\n\nclass T: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    (entry,) = Registry.from_providers({"trainer": [make_provider(**{field: path})]}).of("trainer")
    assert entry.unavailable() == (fault and f"it names {path!r}, but {fault}")


SHOWN = "class Odd:\n    def __repr__(self): raise OSError('odd')\n"
NAMELESS = """
class Nameless(type):
    __name__ = property(lambda self: 1 / 0)
    def __getattribute__(self, name): raise OSError("odd")
class Odd(Exception, metaclass=Nameless): ...
"""
ODD = {
    "error": "class Odd(BaseException):\n    def __str__(self): raise OSError('odd')\nraise Odd\n",
    "object": "class Odd:\n    __class__ = property(lambda self: 1 / 0)\nPROVIDER = Odd()\n",
    "default": f"{SHOWN}@attrs.frozen(kw_only=True)\nclass C:\n    x: int = Odd()\n"
    "PROVIDER = Provider(name='odd', spi=(2, 0), config=C, backend='attrs:frozen')\n",
    "probe": f"{SHOWN}@attrs.frozen(kw_only=True)\nclass C: ...\n"
    "PROVIDER = Provider(name='odd', spi=(2, 0), config=C, backend='attrs:frozen', unavailable=lambda: Odd())\n",
    "error of a class without a name": NAMELESS + "raise Odd\n",
    "error with control characters": "raise OSError('\x1b[2J' + 'm' * 3_000_000)\n",
    "error whose text does not end": "import time\nclass Odd(Exception):\n    def __str__(self): time.sleep(60)\nraise Odd\n",
    "probe's reason": "class Odd(str):\n    def __str__(self): raise OSError('odd')\n"
    "@attrs.frozen(kw_only=True)\nclass C: ...\n"
    "PROVIDER = Provider(name='odd', spi=(2, 0), config=C, backend='attrs:frozen', unavailable=lambda: Odd('x'))\n",
    "exit": "raise SystemExit(0)\n",
    "end of a generator": "raise GeneratorExit\n",
}
TOLD = {
    "error": "import failed in odd_provider, line 5: Odd: <its text raises OSError>",
    "object": "its description raised ZeroDivisionError: division by zero",
    "default": "its description raised OSError: odd",
    "probe": "its probe `unavailable` raised OSError: odd",
    "error of a class without a name": "import failed in odd_provider, line 8: Odd: ",
    "error with control characters": "import failed in odd_provider, line 3: OSError: \\x1b[2Jm",
    "error whose text does not end": "Odd: <the text of an error took longer than 0.3 s (in odd_provider, line 5)",
    "probe's reason": "its probe `unavailable` raised OSError: odd",
    "exit": "import failed in odd_provider, line 3: SystemExit: 0",
    "end of a generator": "import failed in odd_provider, line 3: GeneratorExit: ",
}


@pytest.mark.parametrize(("source", "told"), [(ODD[one], TOLD[one]) for one in ODD], ids=ODD)
def test_what_cannot_be_shown_of_a_plugin_does_not_stop_the_others(installer, monkeypatch, source, told):
    source = f"import attrs\nfrom rlcore.spi import Provider\n{source}"
    installer.add("acme", {"rlcore.trainers": {"odd": "odd_provider:PROVIDER"}}, odd_provider=source)
    installer.trainer("good")
    installed_entry_points()  # the first search for packages takes longer than the limit
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.3)
    good, odd = states_of(discover().of("trainer"))
    assert good.reason is None
    assert told in odd.reason
    assert len(odd.reason) < 3000
    assert odd.reason.isprintable()


class OddText(str):
    __slots__ = ()

    def __str__(self):
        raise OSError("odd")

    __repr__ = __format__ = __len__ = __bool__ = encode = partition = splitlines = __str__


@pytest.mark.parametrize("field", ["name", "backend", "capabilities", "devices"])
def test_texts_of_a_plugin_are_plain_whatever_their_class(make_provider, field):
    right = {"name": "odd", "backend": "attrs:frozen", "capabilities": ["acme:odd"], "devices": ["cpu"]}
    odd = OddText(right[field]) if isinstance(right[field], str) else [OddText(right[field][0])]
    (state,) = states_of(Registry.from_providers({"trainer": [make_provider(**right | {field: odd})]}).of("trainer"))
    assert state.text == "usable"
    assert all(type(text) is str for text in [state.entry.name, *state.entry.provider.capabilities])


def test_a_probe_that_is_late_is_ended_once_and_prints_nothing(make_provider, monkeypatch, capsys):
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.05)
    calls = []

    def late():
        calls.append(print("found a driver"))
        time.sleep(60)

    entry, again = (Registry.from_providers({"trainer": [make_provider(unavailable=late)]}).of("trainer")[0] for _ in range(2))
    assert entry.unavailable().startswith(f"its probe `unavailable` took longer than 0.05 s (in {__name__}, line ")
    assert again.unavailable() == entry.unavailable()
    assert len(calls) == 1
    assert capsys.readouterr().out == ""
