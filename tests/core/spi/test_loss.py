"""What a loss is given as the previous log-probabilities, as the loop declares it."""

import numpy as np
import pytest

from rlcore.spi import PREVIOUS_LOGPROBS, LossSpec

CURRENT, GIVEN = np.zeros(3, np.float32), np.ones(3, np.float32)


@pytest.mark.parametrize(("declared", "found"), [("unchanged", CURRENT), ("given", GIVEN), ("absent", None)])
def test_the_previous_logprobs_are_those_declared_and_no_others(declared, found):
    spec = LossSpec(path="m:f", config=None, previous_logprobs=declared)
    assert spec.previous_of({PREVIOUS_LOGPROBS: GIVEN}, CURRENT) is found


def test_a_declared_column_that_is_not_there_is_not_made_up():
    with pytest.raises(KeyError, match=PREVIOUS_LOGPROBS):
        LossSpec(path="m:f", config=None, previous_logprobs="given").previous_of({}, CURRENT)
