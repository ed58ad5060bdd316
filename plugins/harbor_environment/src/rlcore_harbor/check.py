"""Checks of the section before a run: the folders here, the rest by Harbor in its own interpreter."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.secrets import unset_problems
from rlcore.spi import CheckContext, Problem
from rlcore_harbor.config import SECTION, HarborConfig
from rlcore_harbor.environment import trial_options
from rlcore_harbor.tasks import EXPECTED, task_folders
from rlcore_harbor.trial_server import ProgramError, TrialServer

LOOK_S = 120.0
"""Most seconds in which Harbor looks at agent, environment and tasks."""
SESSION = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "policy"}
"""Variables of a session that is not there: nothing is sent to it."""
INSTALL = "pip install harbor, with Python 3.12 or later"
MAX_TASKS = 5
"""Most tasks that are named."""
PYTHON = f"{SECTION}.python"


def check(context: CheckContext | None, config: HarborConfig) -> list[Problem]:  # noqa: ARG001 - the form
    """Return what is wrong with folders, interpreter, agent, environment and tasks. Nothing is started but the interpreter."""
    problems = [*_folder_problems(config), *unset_problems(SECTION, config.pass_environment)]
    python = sys.executable if config.python is None else config.python
    if shutil.which(expanded(python)) is None:
        found, expected = f"{python!r}, which is no program here", "the interpreter of a Python environment with Harbor"
        return [*problems, Problem(path=PYTHON, found=found, expected=expected)]
    return [*problems, *_harbor_problems(config, python)]


def _folder_problems(config: HarborConfig) -> Iterator[Problem]:
    for name, folder in _folders(config).items():
        if not expanded(folder).is_dir():
            yield Problem(path=f"{SECTION}.{name}", found=f"{folder!r}, which is no folder", expected=EXPECTED)
        elif not task_folders(folder):
            yield Problem(path=f"{SECTION}.{name}", found=f"{folder!r}, which has no task", expected=EXPECTED)


def _folders(config: HarborConfig) -> Mapping[str, str]:
    named = {"tasks": config.tasks, "evaluation_tasks": config.evaluation_tasks}
    return {name: folder for name, folder in named.items() if folder is not None}


def _harbor_problems(config: HarborConfig, python: str) -> Iterator[Problem]:
    tasks = {name: list(map(str, task_folders(folder))) for name, folder in _folders(config).items()}
    request = {"tasks": [one for folders in tasks.values() for one in folders]}
    try:
        answer = _look(config, request)
    except TimeoutError:
        found = f"{python!r}, which gives no answer within {LOOK_S:g} s"
        yield Problem(path=PYTHON, found=found, expected="an answer of Harbor in this time")
        return
    except (ProgramError, OSError) as error:
        found = f"{python!r} ({error})"
        yield Problem(path=PYTHON, found=found, expected="the interpreter of a Python environment with Harbor")
        return
    if "missing" in answer:
        found = f"{python!r}, which has no Harbor ({answer['missing']})"
        remedy = f"Make an environment of its own ({INSTALL}), and name its interpreter."
        yield Problem(path=PYTHON, found=found, expected="an interpreter with Harbor", remedy=remedy)
    elif "expected" in answer:
        found = f"{python!r}, which has Harbor {answer['version']}"
        yield Problem(path=PYTHON, found=found, expected=f"Harbor {answer['expected']} or later", remedy=f"{INSTALL}.")
    else:
        for name, reason in answer["problems"].items():
            found = f"{getattr(config, name)!r}, which Harbor refuses ({reason})"
            yield Problem(path=f"{SECTION}.{name}", found=found, expected=f"an {name} that Harbor can run, and its options")
        for name, folders in tasks.items():
            yield from _task_problems(
                f"{SECTION}.{name}", {one: answer["tasks"][one] for one in folders if one in answer["tasks"]}
            )


def _task_problems(path: str, reasons: Mapping[str, str]) -> Iterator[Problem]:
    expected = "a task with task.toml, instruction.md and tests/test.sh"
    for folder, reason in list(reasons.items())[:MAX_TASKS]:
        yield Problem(path=path, found=f"the task {folder} ({reason})", expected=expected)
    if len(reasons) > MAX_TASKS:
        yield Problem(path=path, found=f"{len(reasons) - MAX_TASKS} further tasks with such faults", expected=expected)


def _look(config: HarborConfig, request: Mapping[str, Any]) -> Mapping[str, Any]:
    server = TrialServer(config.python, config.pass_environment, trial_options(config))
    try:
        return server.ask_now(request, SESSION, LOOK_S)
    finally:
        server.close(0.0)
