"""What is said of packages that are missing; none of it needs SGLang."""

from importlib import metadata

import pytest

from rlcore_sglang import requirements
from rlcore_torchkit.requirements import UNTRIED_VARIABLE


def has_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.delenv(UNTRIED_VARIABLE, raising=False)
    real = metadata.version

    def find(name: str) -> str:
        if name != "sglang":
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", find)


def test_sglang_has_to_be_there_in_a_version_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_installed", lambda _name: True)
    has_version(monkeypatch, None)
    assert requirements.unavailable() == "SGLang is not installed: pip install 'rlcore-sglang[engine]'"
    has_version(monkeypatch, "0.5.16")
    assert "sglang 0.5.16 is installed; expected sglang==0.5.17 or" in (requirements.unavailable() or "")


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23", "0.5.23.post1"])
def test_versions_that_were_tried_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "is_installed", lambda _name: True)
    has_version(monkeypatch, version)
    assert requirements.unavailable() is None


def test_torchvision_is_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    has_version(monkeypatch, "0.5.23")
    monkeypatch.setattr(requirements, "is_installed", lambda _name: False)
    assert (requirements.unavailable() or "").startswith("torchvision is not installed")
