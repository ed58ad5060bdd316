"""The space of arithmetic problems."""

import re

import numpy as np
import pytest

from rlcore_math.config import ArithmeticConfig
from rlcore_math.problems import ProblemSpace


def content(prompt):
    """A prompt's summands with their signs, each with its factors, in no order: what exchanging operands leaves as it is."""
    summands = re.findall(r"([+-])([0-9*]+)", "+" + prompt[:-1])
    return tuple(sorted((sign, *sorted(map(int, factors.split("*")))) for sign, factors in summands))


@pytest.mark.parametrize("operations", ["+", "-", "*", "+-", "-*", "*+", "+-*"])
def test_what_is_held_out_is_counted_with_all_its_exchanges(operations):
    config = ArithmeticConfig(operations=tuple(operations), num_terms=4, max_operand=2, num_train=1, num_evaluation=12)
    space = ProblemSpace(config)
    possible = [space.problem(code)[0] for code in range(space.size)]
    held_out = {content(space.problem(code)[0]) for code in space.evaluation().tolist()}
    assert space.num_left() == sum(content(prompt) not in held_out for prompt in possible)
    numbers = space.canonical(np.arange(space.size))
    assert len(np.unique(numbers)) == len(set(map(content, possible)))
    assert len({(number, content(prompt)) for number, prompt in zip(numbers.tolist(), possible, strict=True)}) == len(
        set(map(content, possible))
    )
