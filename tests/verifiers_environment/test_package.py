"""What is said of packages that are missing; none of it needs `verifiers`."""

from importlib import metadata

import pytest

from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.package import check, module_name, unavailable


def has_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", find)


def test_the_package_has_to_be_there_in_a_version_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    has_version(monkeypatch, None)
    assert unavailable() == "verifiers is not installed: pip install 'rlcore-verifiers[hub]'"
    has_version(monkeypatch, "0.4.0")
    assert "found verifiers 0.4.0; expected" in (unavailable() or "")
    has_version(monkeypatch, "0.2.1")
    assert unavailable() is None


def test_an_environment_is_a_module() -> None:
    assert module_name("owner/some-env") == "some_env"
    assert check(None, VerifiersConfig(name="owner/json")) == []
    (problem,) = check(None, VerifiersConfig(name="owner/no-such-env"))
    assert problem.path == "environment.verifiers.name"
    assert "'no_such_env'" in problem.found
    assert "prime env install owner/no-such-env" in problem.remedy
