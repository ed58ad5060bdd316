"""Missing or unfit libraries are named with their remedy, without importing them."""

import pytest

from rlcore_torchkit import requirements

FITTING = {"torch": "2.11.0", "transformers": "5.19.0"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"torch": "2.11.0-git"}, None),
        ({"torch": "2.15.0", "transformers": "5.24.0"}, None),
        (
            {"torch": "2.9.1+cpu"},
            "torch 2.9.1+cpu is installed; expected torch<2.16,>=2.11: pip install 'torch<2.16,>=2.11'. Nothing was tried with "
            "torch 2.9.1: docs/supported-versions.md says what to try. RLCORE_UNTRIED_VERSIONS=1 runs it all the same",
        ),
        ({"torch": "2.16.0"}, "torch 2.16.0 is installed; expected torch<2.16,>=2.11"),
        ({"transformers": "5.25.0"}, "transformers 5.25.0 is installed; expected transformers<5.25,>=5.17"),
    ],
)
def test_a_version_is_supported_or_named_with_what_to_do(
    changed: dict[str, str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(requirements.UNTRIED_VARIABLE, raising=False)
    monkeypatch.setattr(requirements.metadata, "version", lambda name: (FITTING | changed)[name])
    assert (requirements.missing_requirement() or "").startswith(reason or "")
    assert (requirements.missing_requirement() is None) == (reason is None)
    monkeypatch.setenv(requirements.UNTRIED_VARIABLE, "1")
    assert requirements.missing_requirement() is None


def test_what_is_here_serves_and_what_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.missing_requirement() is None
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    assert requirements.missing_requirement() == "torch is not installed: pip install 'torch<2.16,>=2.11'"
