"""`rlcore verify`: which plugin, with which options, and how cases are summed up. test_verify.py runs it."""

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.registry.discovery import discover
from rlcore.spi import ConfigError, PluginError
from rlcore_conformance.cli.verify_command import find, options_of, summed_up


def case(check, outcome, seconds=0.5, reason=""):
    return {"check": check, "says": "It holds.", "case": check, "outcome": outcome, "reason": reason, "seconds": seconds}


def test_a_name_that_several_roles_have_needs_the_role(installer):
    installer.trainer("twin")
    installer.add("acme-broken", {"rlcore.sinks": {"twin": "absent_module:PROVIDER"}})
    with pytest.raises(PluginError, match="trainer, sink; .* --role"):
        find(discover(), "twin", None)
    assert find(discover(), "twin", "trainer").role == "trainer"
    with pytest.raises(PluginError, match="absent_module"):
        find(discover(), "twin", "sink")


def test_a_name_that_is_not_installed_is_told_with_those_that_are(installer):
    installer.trainer("swift")
    with pytest.raises(PluginError, match=r"found no trainer 'swif'.*swift"):
        find(discover(), "swif", "trainer")


def test_options_are_those_of_the_plugins_section(installer):
    installer.trainer("mine")
    entry = find(discover(), "mine", None)
    with pytest.raises(ConfigError, match=r"trainer\.mine\.absent"):
        options_of(entry, ["absent=1"])
    assert options_of(entry, []) == {}


def test_cases_of_a_check_are_one_line():
    checks = summed_up(
        iter(
            [
                case("test_a", "passed"),
                case("test_a", "failed", reason="1 != 2"),
                case("test_a", "failed", reason="1 != 2"),
                case("test_b", "skipped", reason="not declared"),
                case("test_b", "passed"),
                case("test_c", "skipped", reason="not declared"),
            ]
        )
    )
    assert [(check.name, check.outcome, check.num_cases, check.seconds) for check in checks] == [
        ("test_a", "failed", 3, 1.5),
        ("test_b", "passed", 2, 1.0),
        ("test_c", "skipped", 1, 0.5),
    ]
    assert [check.reason for check in checks] == ["1 != 2", "", "not declared"]


def test_a_row_has_to_be_an_object():
    result = CliRunner().invoke(cli, ["verify", "function", "--row", "[1]"])
    assert result.exit_code == 2
    assert "--row: found '[1]'" in result.stderr
