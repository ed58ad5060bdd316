"""Keys that only agents have."""

from collections.abc import Callable

import pytest

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError

Prepare = Callable[..., RunPlan]


def test_a_history_that_only_agents_have_is_refused(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared('rollout.history="segment"')
    assert [problem.path for problem in raised.value.problems] == ["rollout.history"]
