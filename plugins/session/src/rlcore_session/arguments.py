"""Checks of the arguments of a session's calls."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from rlcore.spi import LoraSpec, Problem

FLOAT32 = np.finfo(np.float32)


def setting_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with the settings of optim_step."""
    problems = []
    for name, value in settings.items():
        values: list[Any] = (
            [value] if name != "betas" else list(value) if isinstance(value, list | tuple) and len(value) == 2 else [None]
        )
        low = float(FLOAT32.tiny) if name == "eps" else 0  # an eps of 0 divides by the moments of a gradient that is 0
        high = 1.0 if name == "betas" else float(FLOAT32.max)
        if value is not None and not all(is_number(one) and low <= one < high for one in values):
            expected = "two numbers from 0 to below 1" if name == "betas" else f"a number of float32, at least {low:g}"
            problems.append(Problem(path=name, found=repr(value), expected=expected))
    return problems


def adapter_problems(name: Any, seed: Any, drops: Any) -> Iterator[Problem]:
    """Yield what is wrong with the arguments of use_adapter."""
    if not isinstance(name, str):
        yield Problem(path="name", found=repr(name), expected="a text")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        yield Problem(path="seed", found=repr(seed), expected="an integer")
    if isinstance(drops, str) or not isinstance(drops, Sequence) or not all(isinstance(one, str) for one in drops):
        yield Problem(path="drops", found=repr(drops), expected="a list of names")


def rank_problems(seed: Any, rank: Any, lora: LoraSpec) -> Iterator[Problem]:
    """Yield what is wrong with the rank of an adapter."""
    if rank is None:
        return
    is_whole = not isinstance(rank, bool) and isinstance(rank, Integral)
    least = 1 if lora.init_from is None else lora.rank
    if not is_whole or not least <= rank <= lora.rank:
        of = "lora.rank" if lora.init_from is None else "lora.rank, as lora.init_from has it"
        yield Problem(path="rank", found=repr(rank), expected=f"an integer from {least} to {lora.rank}, the {of}")
    elif seed is None:
        yield Problem(path="rank", found=f"{rank}, without a seed", expected="both: an adapter begins with its rank")


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
