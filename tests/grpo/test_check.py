"""Options of GRPO that do not go together."""

from attrs import evolve

from rlcore.spi import (
    CheckContext,
    ModelSpec,
)
from rlcore_grpo.check import check
from rlcore_grpo.config import GrpoConfig


def test_turns_are_compared_where_there_are_several():
    context = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=8)
    (problem,) = check(context, GrpoConfig(advantage_per="turn"))
    assert problem.path == "algorithm.grpo.advantage_per"
    assert not check(evolve(context, max_turns=2), GrpoConfig(advantage_per="turn"))
