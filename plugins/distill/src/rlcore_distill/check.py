"""Checks of `[algorithm.distill]` across its fields."""

import os
from collections.abc import Iterator, Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_distill.config import DistillConfig

SECTION = "algorithm.distill"


def check(context: CheckContext, config: DistillConfig) -> Sequence[Problem]:
    """Return what is wrong with the teachers."""
    del context
    return list(_problems(config))


def _problems(config: DistillConfig) -> Iterator[Problem]:
    if config.teachers and config.samples == "teacher":
        yield Problem(
            path=f"{SECTION}.teachers",
            found='the section, with samples = "teacher", whose gradient is that of the texts alone',
            expected='samples = "student"',
        )
    if len(config.teachers) == 1 and (only := next(iter(config.teachers))) and config.teachers[only].weight != 1.0:
        found = f"{config.teachers[only].weight:g}, of one teacher alone"
        yield Problem(path=f"{SECTION}.teachers.{only}.weight", found=found, expected="1.0, or several teachers")
    for name, teacher in config.teachers.items():
        section = f"{SECTION}.teachers.{name}"
        if not teacher.base_url.startswith(("http://", "https://")):
            expected = "an address that begins with http:// or https://"
            yield Problem(path=f"{section}.base_url", found=repr(teacher.base_url), expected=expected)
        if teacher.api_key_env is not None and not os.environ.get(teacher.api_key_env):
            found = f"{teacher.api_key_env}, which is not set"
            yield Problem(path=f"{section}.api_key_env", found=found, expected="a variable of the environment")
