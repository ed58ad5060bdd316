"""Missing or unfit libraries are named with their remedy, without importing them."""

from pathlib import Path

import pytest

from rlcore.spi.errors import PluginError
from rlcore_torchkit import requirements

FITS = {"torch": "2.13.0+cpu", "transformers": "5.19.0"}


def test_what_is_here_serves() -> None:
    assert requirements.missing_requirement() is None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of all installed distributions, and no leave for untried versions."""
    monkeypatch.delenv(requirements.UNTRIED_VARIABLE, raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: name)
    return tmp_path


def install(site: Path, versions: dict[str, str], requires: tuple[str, ...] = (), builds: tuple[str, ...] = ()) -> None:
    """Install metadata of these versions; of torchvision with its requirements, and its version.py with a build."""
    for name, version in versions.items():
        information = site / f"{name}-{version}.dist-info"
        information.mkdir()
        lines = [f"Requires-Dist: {line}" for line in requires if name in ("torchvision", "torchaudio")]
        information.joinpath("METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        )
    for name, build in (text.split("+") for text in builds):
        (site / name).mkdir()
        (site / name / "version.py").write_text(f"__version__: str = '9.9.9+{build}'\n")


UNFIT = {
    "old torch": (
        {"torch": "2.9.1+cpu"},
        (),
        (),
        "torch 2.9.1+cpu is installed; expected torch<2.16,>=2.11: pip install 'torch<2.16,>=2.11'. Nothing was tried with "
        "torch 2.9.1: docs/supported-versions.md says what to try. RLCORE_UNTRIED_VERSIONS=1 runs it all the same",
    ),
    "new torch": ({"torch": "2.16.0"}, (), (), "torch 2.16.0 is installed; expected torch<2.16,>=2.11"),
    "new transformers": (
        {"transformers": "5.25.0"},
        (),
        (),
        "transformers 5.25.0 is installed; expected transformers<5.25,>=5.17",
    ),
    "newest of both": ({"torch": "2.15.0", "transformers": "5.24.0"}, (), (), None),
    "torch of a commit": ({"torch": "2.13.0-git"}, (), (), None),
    "torchvision of another torch": (
        {"torchvision": "0.29.0"},
        ("torch==2.14.0", "numpy"),
        (),
        "torchvision 0.29.0 needs torch==2.14.0; found torch 2.13.0+cpu: transformers' models cannot be imported beside it "
        "(operator torchvision::nms does not exist). pip uninstall torchvision",
    ),
    "torchvision for CUDA": (
        {"torchvision": "0.28.0"},
        ("torch==2.13.0",),
        ("torchvision+cu130",),
        "torchvision 0.28.0 is built for cu130, torch 2.13.0+cpu for cpu",
    ),
    "torchvision for another CUDA": (
        {"torch": "2.13.0", "torchvision": "0.28.0"},
        ("torch==2.13.0",),
        ("torchvision+cu126", "torch+cu130"),
        "torchvision 0.28.0 is built for cu126, torch 2.13.0 for cu130",
    ),
    "torchaudio of another torch": (
        {"torchaudio": "2.8.0"},
        ("torch==2.8.0",),
        (),
        "torchaudio 2.8.0 needs torch==2.8.0; found torch 2.13.0+cpu",
    ),
    "torchaudio for CUDA": ({"torchaudio": "2.11.0"}, (), ("torchaudio+cu130",), "torchaudio 2.11.0 is built for cu130"),
    "torchaudio for CPUs": ({"torchaudio": "2.11.0+cpu"}, (), (), None),
    "torchvision of the same torch": (
        {"torch": "2.13.0", "torchvision": "0.28.0"},
        ("torch==2.13.0",),
        ("torchvision+cu130", "torch+cu130"),
        None,
    ),
    "torchvision of a prerelease": ({"torch": "2.14.0a0+git1", "torchvision": "0.29.0a0"}, ("torch==2.14.0",), (), None),
}


@pytest.mark.parametrize(("versions", "requires", "builds", "expected"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_named_with_its_remedy(
    site: Path, versions: dict[str, str], requires: tuple[str, ...], builds: tuple[str, ...], expected: str | None
) -> None:
    install(site, FITS | versions, requires, builds)
    reason = requirements.missing_requirement()
    assert reason is None if expected is None else str(reason).startswith(expected), reason


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", None),
        ("0", "=1 runs it all the same"),
        ("", "all the same"),
        ("true", "all the same; found RLCORE_UNTRIED_VERSIONS='true'"),
    ],
)
def test_a_version_that_nothing_was_tried_with_runs_where_that_is_said(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None
) -> None:
    install(site, FITS | {"torch": "2.16.0"})
    monkeypatch.setenv(requirements.UNTRIED_VARIABLE, value)
    reason = requirements.missing_requirement()
    assert reason is None if expected is None else str(reason).endswith(expected)


@pytest.mark.parametrize(("line", "expected"), [("Requires-Python: >=3.11", "2.0"), ("Author: me", None)])
def test_damaged_metadata_names_what_to_install_anew(site: Path, line: str, expected: str | None) -> None:
    (site / "torch-2.0.dist-info").mkdir()
    text = "Name: torch\n" + (f"Version: {expected}\n" if expected else "")
    (site / "torch-2.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}{line}\n")
    found = requirements.installed_version("torch")
    assert (None if found is None else str(found)) == expected
    assert "torch" in str(requirements.missing_requirement())
    with pytest.raises(PluginError) as caught:
        requirements.supported_versions("torch", "numpy")
    assert str(caught.value).endswith("pip install --force-reinstall --no-deps torch")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    assert requirements.missing_requirement() == "torch is not installed: pip install 'torch<2.16,>=2.11'"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "99.1.0",
            "transformers 99.1.0 wrote config.json and knows it: pip install 'transformers>=99.1.0'; rlcore was tried with",
        ),
        ("99.1.0.dev0", "transformers 99.1.0.dev0 wrote config.json and knows it: pip install 'transformers>=99.1.0'"),
        ("4.1.0", ""),
        ("newest", ""),
        (None, ""),
    ],
)
def test_the_version_that_wrote_a_config_is_the_remedy_where_it_is_newer(written: object, expected: str) -> None:
    told = requirements.newer_transformers({"transformers_version": written})
    assert told.startswith(expected)
    assert bool(told) == bool(expected)
