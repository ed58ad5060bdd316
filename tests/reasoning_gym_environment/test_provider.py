"""What is listed without importing the package, and where it is missing."""

import sys

from rlcore_reasoning_gym.config import ReasoningGymConfig
from rlcore_reasoning_gym.provider import REASONING_GYM


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    assert REASONING_GYM.unavailable() is None
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install" in REASONING_GYM.unavailable()


def test_as_many_calls_as_processes():
    assert REASONING_GYM.max_concurrent(ReasoningGymConfig(num_processes=3)) == 3
    assert REASONING_GYM.max_concurrent(ReasoningGymConfig()) >= 1
