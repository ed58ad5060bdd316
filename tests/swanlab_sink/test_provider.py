"""The entry point, with the tracker and without."""

import pytest

from rlcore_swanlab import provider


@pytest.mark.parametrize("is_there", [False, True])
def test_a_tracker_that_is_not_there_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(provider, "is_installed", lambda name: is_there)
    reason = provider.PROVIDER.unavailable()
    assert reason is None if is_there else "pip install 'rlcore-swanlab[tracker]'" in reason
