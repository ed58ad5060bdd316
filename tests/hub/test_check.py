"""An upload without a token is refused before the run."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlcore_hub import check


@pytest.mark.parametrize(("token", "problems"), [("hf_secret", 0), (None, 1)])
def test_an_upload_needs_a_token(monkeypatch: pytest.MonkeyPatch, token: str | None, problems: int) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    plan: Any = SimpleNamespace(recipe=SimpleNamespace(checkpoint=SimpleNamespace(push_to_hub="ann/sums")))
    found = [str(one) for one in check.hub_problems(plan)]
    assert len(found) == problems
    assert all("HF_TOKEN" in one for one in found)
