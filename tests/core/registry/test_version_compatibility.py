"""Versions of rlcore's distributions that do not fit together are named before anything is imported."""

from importlib import metadata

import pytest
from click.testing import CliRunner
from packaging.version import Version

import rlcore
from rlcore.cli.main import cli
from rlcore.installed import incompatibility
from rlcore.registry.discovery import discover

VERSION = Version(rlcore.__version__)
FITS = f"rlcore>={VERSION.major}.{VERSION.minor},<{VERSION.major}.{VERSION.minor + 1}"
NEXT = f"rlcore>={VERSION.major}.{VERSION.minor + 1}"
REMEDY = "Install versions that fit together: all of rlcore's packages of one version do"


@pytest.fixture
def plugin(installer):
    """Installs acme-swift, with the trainer `swift`, whose module fails where it is imported; returns what does not fit it."""

    def install(*requires):
        source = "raise RuntimeError('imported')\n"
        installer.add("acme-swift", {"rlcore.trainers": {"swift": "swift_provider:P"}}, "2.5", requires, swift_provider=source)
        return incompatibility(metadata.distribution("acme-swift"))

    return install


def test_what_fits_has_nothing_to_say(installer, plugin):
    installer.add("rlcore-torchkit", {}, "0.1.7", [FITS, "torch>=99"])
    others = ("numpy>=99", "rlcore[testing]>=99; extra == 'test'", "rlcore-absent; python_version < '3'")
    assert plugin(FITS, "rlcore-torchkit<0.2", "rlcore-torchkit>=0.1.2", *others) is None
    assert incompatibility(None) is None


def test_another_minor_version_of_the_core_is_named_and_nothing_is_imported(plugin):
    found = f"acme-swift 2.5 requires {NEXT}; found rlcore {rlcore.__version__}. {REMEDY}"
    assert plugin(NEXT) == found
    (entry,) = discover().of("trainer")
    assert entry.error == found
    assert entry.provider is None


def test_the_next_minor_versions_prereleases_do_not_fit(installer, plugin):
    installer.add("rlcore-torchkit", {}, "0.2.0rc1")
    assert "found rlcore-torchkit 0.2.0rc1" in plugin("rlcore-torchkit>=0.1,<0.2")


def test_prereleases_of_a_version_that_fits_do(installer, plugin):
    installer.add("rlcore-torchkit", {}, "0.1.1rc1")
    assert plugin("rlcore-torchkit>=0.1,<0.2") is None


def test_all_that_does_not_fit_is_named_at_once_through_what_is_required_too(installer, plugin):
    installer.add("rlcore-torchkit", {}, "0.1.7", [NEXT, "rlcore-torchkit"])
    found = plugin("rlcore-torchkit", "Rlcore_Absent>=3", "rlcore-torchkit>=0.2")
    assert found == (
        f"rlcore-torchkit 0.1.7 requires {NEXT}; found rlcore {rlcore.__version__}; "
        "acme-swift 2.5 requires rlcore-torchkit>=0.2; found rlcore-torchkit 0.1.7. " + REMEDY
    )


def test_one_that_is_not_installed_is_named(plugin):
    assert plugin(FITS, "rlcore-torchkit>=0.1") == (
        f"acme-swift 2.5 requires rlcore-torchkit>=0.1, which is not installed. {REMEDY}"
    )


@pytest.mark.parametrize("arguments", [["check"], ["train"]])
def test_a_run_is_refused(plugin, tmp_path, arguments):
    plugin(NEXT)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'run.directory = "{tmp_path}"\nmodel.path = "none"\nalgorithm.name = "none"\nenvironment.name = "python"\n'
        'trainer.name = "swift"\n'
    )
    result = CliRunner().invoke(cli, [*arguments, str(recipe)])
    assert result.exit_code != 0
    assert f"acme-swift 2.5 requires {NEXT}; found rlcore {rlcore.__version__}" in " ".join(result.output.split())


def test_the_listing_shows_it(plugin):
    plugin(NEXT)
    result = CliRunner().invoke(cli, ["plugins"], env={"COLUMNS": "400"})
    assert f"not usable (acme-swift 2.5): acme-swift 2.5 requires {NEXT}" in result.output
