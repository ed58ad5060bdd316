"""Options of the math environment that do not go together."""

from rlcore.spi import (
    CheckContext,
    ModelSpec,
)
from rlcore_math.checks import check_math
from rlcore_math.config import MathConfig


def test_a_slow_answer_must_be_found_wrong_before_its_call_fails_though_a_process_starts_first():
    context = CheckContext(
        model=ModelSpec(path="m"), device="cpu", world_size=1, max_sequence_length=8, environment_timeout_s=13.0
    )
    assert check_math(context, MathConfig(verification_timeout_s=3.0)) == []
    [problem] = check_math(context, MathConfig(verification_timeout_s=3.1))
    assert (problem.path, problem.found) == ("environment.math.verification_timeout_s", "3.1")
    assert problem.expected == "at least 10 s less than rollout.environment_timeout_s, which is 13"
