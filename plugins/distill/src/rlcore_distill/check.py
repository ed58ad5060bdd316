"""Checks of `[algorithm.distill]` across its fields."""

from collections.abc import Iterator, Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_distill.config import DistillConfig
from rlcore_torchkit.rl.endpoint_config import endpoint_problems

SECTION = "algorithm.distill"


def check(context: CheckContext, config: DistillConfig) -> Sequence[Problem]:
    """Return what is wrong with the teachers."""
    del context
    return list(_problems(config))


def _problems(config: DistillConfig) -> Iterator[Problem]:
    if config.teachers and config.samples == "teacher":
        yield Problem(
            path=f"{SECTION}.teachers",
            found='the section, with samples = "teacher", whose texts [reference] scores once for the whole run',
            expected='samples = "student"',
        )
    if config.lmbda < 1 and config.samples == "teacher":
        yield Problem(
            path=f"{SECTION}.lmbda",
            found=f'{config.lmbda:g}, with samples = "teacher", which samples nothing',
            expected='no such key, or samples = "student"',
        )
    elif config.lmbda == 0:
        found = "0.0, which gives the samples no weight"
        yield Problem(path=f"{SECTION}.lmbda", found=found, expected='samples = "teacher", which samples nothing')
    divergence = {"beta": config.beta_of_samples, "lmbda": config.lmbda}
    for key, value in divergence.items() if len(config.teachers) > 1 else ():
        if value != 1:
            found = f"{value:g}, with {len(config.teachers)} teachers, whose weighted mean is of reverse KL divergences"
            yield Problem(path=f"{SECTION}.{key}", found=found, expected="1.0, or one teacher")
    if len(config.teachers) == 1 and (only := next(iter(config.teachers))) and config.teachers[only].weight != 1.0:
        found = f"{config.teachers[only].weight:g}, of one teacher alone"
        yield Problem(path=f"{SECTION}.teachers.{only}.weight", found=found, expected="1.0, or several teachers")
    for name, teacher in config.teachers.items():
        yield from endpoint_problems(f"{SECTION}.teachers.{name}", teacher)
