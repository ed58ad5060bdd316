"""Missing or unfit libraries are named with their remedy, without importing them."""

import pytest

from rlcore_torchkit import requirements


def test_what_is_here_serves_and_otherwise_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.missing_requirement() is None
    monkeypatch.setattr(requirements.metadata, "version", lambda name: {"torch": "2.9.1+cpu", "transformers": "5.19.0"}[name])
    assert requirements.missing_requirement() == "torch 2.9.1+cpu is installed; expected >=2.11: pip install 'torch>=2.11'"
    monkeypatch.setattr(requirements.metadata, "version", lambda name: {"torch": "2.11.0", "transformers": "6.0.0"}[name])
    reason = requirements.missing_requirement()
    assert reason is not None
    assert "transformers 6.0.0 is installed; expected >=5.17,<5.20" in reason
    monkeypatch.setattr(requirements.metadata, "version", lambda name: {"torch": "2.11.0-git", "transformers": "5.19.0"}[name])
    assert requirements.missing_requirement() is None
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    assert requirements.missing_requirement() == "torch is not installed: pip install torch"
