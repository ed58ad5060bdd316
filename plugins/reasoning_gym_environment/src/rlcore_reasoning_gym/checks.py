"""Checks of `[environment.reasoning_gym]`, beyond types."""

import os
from collections.abc import Iterator

from rlcore.schema.suggestions import nearest
from rlcore.spi import CheckContext, Problem
from rlcore_reasoning_gym.config import FamilyConfig, ReasoningGymConfig
from rlcore_reasoning_gym.families import FAMILIES, FOLLOW_HASH_SEED, RESERVED, Family, num_levels, option_names

SECTION = "environment.reasoning_gym"
MAX_START_S = 15.0
"""Seconds that a process that scores takes to start on a busy machine; on an idle one, 2 s."""


def check_reasoning_gym(context: CheckContext | None, config: ReasoningGymConfig) -> list[Problem]:
    """Problems of the section, and of each family in it; the families look at their own options."""
    problems = []
    if not config.families:
        remedy = f"Write [{SECTION}.families.chain_sum], or any of: {', '.join(FAMILIES)}"
        problems.append(Problem(path=f"{SECTION}.families", found="no family", expected="one at least", remedy=remedy))
    if config.system_prompt is not None and config.prompt_format == "text":
        remedy = 'Put it into the instruction, or set prompt_format = "chat"'
        expected = 'none where prompt_format = "text"'
        problems.append(Problem(path=f"{SECTION}.system_prompt", found="a text", expected=expected, remedy=remedy))
    limit_s = None if context is None else context.environment_timeout_s
    if limit_s is not None and limit_s < config.scoring_timeout_s + MAX_START_S:
        expected = f"at least {MAX_START_S:g} s less than rollout.environment_timeout_s, which is {limit_s:g}"
        remedy = (
            "A call of the environment that takes longer fails, instead of earning nothing; the first ones start the processes"
        )
        found = str(config.scoring_timeout_s)
        problems.append(Problem(path=f"{SECTION}.scoring_timeout_s", found=found, expected=expected, remedy=remedy))
    for name, family in config.families.items():
        problems += _check_family(name, family, config.num_train)
    return problems


def _check_family(name: str, config: FamilyConfig, num_train: int) -> list[Problem]:
    path = f"{SECTION}.families.{name}"
    if name not in FAMILIES:
        near = nearest(name, FAMILIES)
        remedy = f"Did you mean {near}?" if near else f"There are: {', '.join(FAMILIES)}"
        if name == "composite":
            remedy = "Several families below families, with their weights, are a mixture"
        return [
            Problem(path=path, found="an unknown family", expected=f"one of reasoning-gym's {len(FAMILIES)}", remedy=remedy)
        ]
    problems = [*_hash_seed_problems(path, name), *_level_problems(path, name, config), *_option_problems(path, name, config)]
    return problems or [*_own_problems(path, name, config, num_train)]


def _hash_seed_problems(path: str, name: str) -> Iterator[Problem]:
    if name in FOLLOW_HASH_SEED and os.environ.get("PYTHONHASHSEED") in (None, "", "random"):
        remedy = "Start the run with the environment variable PYTHONHASHSEED=0, or leave the family out"
        found = "a family whose problems differ from one process to the next, so that a resumed run would have others"
        yield Problem(path=path, found=found, expected="PYTHONHASHSEED to be a number", remedy=remedy)


def _level_problems(path: str, name: str, config: FamilyConfig) -> Iterator[Problem]:
    if not config.levels:
        return
    most = num_levels(name) - 1
    if most < 0:
        expected = "none: the family has no curriculum"
        yield Problem(
            path=f"{path}.levels", found=str(list(config.levels)), expected=expected, remedy="Set its options instead"
        )
    elif max(config.levels) > most:
        expected = f"levels from 0 to {most}, which the family's curriculum has"
        yield Problem(path=f"{path}.levels", found=str(max(config.levels)), expected=expected)


def _option_problems(path: str, name: str, config: FamilyConfig) -> Iterator[Problem]:
    names = option_names(name)
    for option in config.options:
        where = f"{path}.options.{option}"
        if option in RESERVED:
            instead = "problem_seed" if option == "seed" else "num_train and num_evaluation"
            remedy = f"Set {SECTION}.{instead}"
            yield Problem(path=where, found="an option that the environment sets", expected="another one", remedy=remedy)
        elif option not in names:
            near = nearest(option, names)
            remedy = f"Did you mean {near}?" if near else ""
            expected = f"one of {', '.join(names)}" if names else "none: the family has no options"
            yield Problem(path=where, found="an unknown option", expected=expected, remedy=remedy)


def _own_problems(path: str, name: str, config: FamilyConfig, num_train: int) -> Iterator[Problem]:
    """Problems that the family finds in its options, or raises over its first problem."""
    for level in config.levels or (None,):
        try:
            Family(name=name, level=level, options=config.options).data_set(0, num_train)[0]
        except Exception as error:  # families raise AssertionError, ValueError, TypeError and others
            given = ", ".join(f"{option} = {value!r}" for option, value in config.options.items()) or "no options"
            found = given if level is None else f"level {level} and {given}"
            expected = f"what reasoning-gym takes: {type(error).__name__}: {str(error).strip() or 'no message'}"
            yield Problem(path=f"{path}.options", found=found, expected=expected)
