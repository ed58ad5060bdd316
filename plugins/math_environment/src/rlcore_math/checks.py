"""Checks of this package's recipe sections, beyond types."""

from rlcore.spi import CheckContext, Problem
from rlcore_math.config import PROBLEM, ArithmeticConfig, CalculatorConfig, MathConfig, ProblemConfig
from rlcore_math.problems import MAX_SPACE, ProblemSpace

MAX_START_S = 10.0
"""Seconds that a process that verifies takes to start on a busy machine; on an idle one, 2 s."""


def check_arithmetic(_context: CheckContext | None, config: ArithmeticConfig) -> list[Problem]:
    """Problems of `[environment.arithmetic]`."""
    return _check_space(config, "arithmetic")


def check_calculator(context: CheckContext | None, config: CalculatorConfig) -> list[Problem]:
    """Problems of `[environment.calculator]`, and of a recipe that leaves no turn for an answer."""
    problems = _check_space(config, "calculator")
    if context is not None and context.max_turns < 2:
        expected = "at least 2: one to call the calculator, one to answer"
        problems.append(Problem(path="rollout.max_turns", found=str(context.max_turns), expected=expected))
    return problems


def check_math(context: CheckContext | None, config: MathConfig) -> list[Problem]:
    """Problems of `[environment.math]`."""
    problems = []
    if PROBLEM not in config.instruction:
        remedy = "The policy would never see what it is asked"
        problems.append(_problem("math.instruction", f"{config.instruction!r:.60}", f"a text with {PROBLEM} in it", remedy))
    if config.system_prompt is not None and config.prompt_format == "text":
        remedy = 'Put it into the instruction, or set prompt_format = "chat"'
        problems.append(_problem("math.system_prompt", "a text", 'none where prompt_format = "text"', remedy))
    limit_s = None if context is None else context.environment_timeout_s
    if limit_s is not None and limit_s < config.verification_timeout_s + MAX_START_S:
        expected = f"at least {MAX_START_S:g} s less than rollout.environment_timeout_s, which is {limit_s:g}"
        remedy = "A call of the environment that takes longer fails, instead of being wrong; the first ones start the processes"
        problems.append(_problem("math.verification_timeout_s", str(config.verification_timeout_s), expected, remedy))
    return problems


def _check_space(config: ProblemConfig, section: str) -> list[Problem]:
    if config.max_operand < config.min_operand:
        expected = f"at least min_operand, which is {config.min_operand}"
        return [_problem(f"{section}.max_operand", str(config.max_operand), expected)]
    space = ProblemSpace(config)
    widen = "Lower it, or raise max_operand, num_terms or the number of operations"
    if space.size > MAX_SPACE:
        found = f"{space.size:.3g} possible problems"
        return [_problem(f"{section}.max_operand", found, f"at most {MAX_SPACE:.3g}", "Lower max_operand or num_terms")]
    if config.num_evaluation >= space.size:
        expected = f"fewer than the {space.size} possible problems"
        return [_problem(f"{section}.num_evaluation", str(config.num_evaluation), expected, widen)]
    left = space.num_left()
    if config.num_train > left:
        expected = (
            f"at most {left}: of {space.size} possible problems, {space.size - left} are held out or exchange their operands"
        )
        return [_problem(f"{section}.num_train", str(config.num_train), expected, widen)]
    return []


def _problem(option: str, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=f"environment.{option}", found=found, expected=expected, remedy=remedy)
