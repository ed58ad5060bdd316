"""Checks `[environment.code]` beyond types."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rlcore.spi import CheckContext, Note, PluginError, Problem
from rlcore_code.config import PROBLEM, CodeConfig
from rlcore_code.sandbox import GRACE_S, Sandbox

LIMITS_NOTE = (
    "programs of the policy run without namespaces. On a kernel without Landlock they can read what their user can read; use "
    "it inside a container that holds nothing else"
)


def check_code(context: CheckContext | None, config: CodeConfig) -> list[Problem | Note]:
    """Return the problems of the section, among them a machine that cannot isolate programs, and a note on weak isolation."""
    found: list[Problem | Note] = [*_check_prompt(config), *_check_time(context, config), *_check_paths(config)]
    if config.isolation == "limits":
        found.append(Note(path="environment.code.isolation", text=LIMITS_NOTE))
    if not any(isinstance(one, Problem) for one in found):
        found += _check_machine(config)
    return found


def _check_prompt(config: CodeConfig) -> list[Problem]:
    problems = []
    if PROBLEM not in config.instruction:
        remedy = "The policy would never see what it is asked"
        problems.append(_problem("instruction", f"{config.instruction!r:.60}", f"a text with {PROBLEM} in it", remedy))
    if config.system_prompt is not None and config.prompt_format == "text":
        remedy = 'Put it into the instruction, or set prompt_format = "chat"'
        problems.append(_problem("system_prompt", "a text", 'none where prompt_format = "text"', remedy))
    return problems


def _check_time(context: CheckContext | None, config: CodeConfig) -> list[Problem]:
    limit_s = None if context is None else context.environment_timeout_s
    if limit_s is None or limit_s >= config.wall_time_s + GRACE_S:
        return []
    expected = f"at least {GRACE_S:g} s less than rollout.environment_timeout_s, which is {limit_s:g}"
    remedy = "A call of the environment that takes longer fails, instead of being wrong"
    return [_problem("wall_time_s", f"{config.wall_time_s:g}", expected, remedy)]


def _check_paths(config: CodeConfig) -> list[Problem]:
    problems = []
    if config.python is not None and not config.python.is_file():
        problems.append(_problem("python", str(config.python), "an interpreter of Python"))
    for index, folder in enumerate(config.readable):
        if not (folder.is_absolute() and folder.is_dir()):
            problems.append(_problem(f"readable[{index}]", str(folder), "the absolute path of a folder"))
    return problems


def _check_machine(config: CodeConfig) -> list[Problem]:
    """Run a program that does nothing."""
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop in this thread
            run = Sandbox(config).run({"main.py": "print(1)"}, wall_time_s=config.wall_time_s)
            execution = thread.submit(asyncio.run, run).result()
        reason = None if execution.output == b"1\n" else f"a program that prints 1 ended with exit code {execution.exit_code}"
    except PluginError as error:
        reason = str(error)
    if reason is None:
        return []
    if config.isolation == "namespaces":
        remedy = (
            "Let users make namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in "
            'Docker a seccomp profile that allows unshare, mount and pivot_root), or accept the weaker isolation = "limits"'
        )
        return [_problem("isolation", reason, "a machine that runs programs in namespaces", remedy)]
    remedy = "Where the run is root's, programs run as the user 65534, who has to be able to read environment.code.python"
    return [_problem("isolation", reason, "a machine that runs programs under limits", remedy)]


def _problem(option: str, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=f"environment.code.{option}", found=found, expected=expected, remedy=remedy)
