"""A program for a Python environment with Harbor: it forks a process for each trial, or for a look at what trials need.

`python trial_program.py FD DESCENDANTS` imports Harbor, agent and environment once, as the options in the first line of its
standard input name them. It then takes connections of the listening socket FD. Each brings one request and gets one answer, a
line of JSON each. The end of a connection cancels its trial, which then removes its container. The end of standard input
cancels all trials and ends the program. DESCENDANTS is the path of `rlcore_workers/descendants.py`. Both files import Harbor
and the standard library alone.
"""

import asyncio
import gc
import importlib.util
import json
import math
import os
import re
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

STOP_S = 30.0
"""Most seconds in which a cancelled trial removes its container."""
POLL_S = 0.05
SHOWN_BYTES = 4096
"""The size of what a trial printed last that is kept."""
MINIMUM = (0, 26)
"""The first version of Harbor whose trials this program was tried with."""
RESULT = {
    "exception_info": {"exception_type", "exception_message"},
    "verifier_result": True,
    "step_results": {"__all__": {"exception_info": {"exception_type", "exception_message"}}},
    **dict.fromkeys(("environment_setup", "agent_setup", "agent_execution", "verifier"), True),
}
"""The fields of Harbor's TrialResult that an answer has."""


def trial_config(request: Mapping[str, Any]) -> Any:
    """Return Harbor's TrialConfig of a request."""
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig

    environment = importable(request["environment"])
    place = "import_path" if ":" in environment else "type"
    return TrialConfig(
        task=TaskConfig(path=Path(request["task"])),
        trials_dir=Path(request["trials_folder"]),
        agent=AgentConfig(**agent_fields(request), override_timeout_sec=request["agent_timeout_s"]),
        environment=EnvironmentConfig(**{place: environment}, kwargs=request["environment_options"]),
        verifier=VerifierConfig(override_timeout_sec=request["verifier_timeout_s"]),
    )


def agent_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the agent's fields of AgentConfig. An agent without an option for it finds the address in OPENAI_BASE_URL."""
    fields = {"name": importable(request["agent"]), "kwargs": request["agent_options"]}
    agent = agent_class(request)
    if agent.MODEL_CONNECTION is not None and agent.capabilities.base_url:
        fields["base_url"] = os.environ["OPENAI_BASE_URL"]
    return fields | {"model_name": f"openai/{os.environ['OPENAI_MODEL']}"}


def agent_class(request: Mapping[str, Any]) -> Any:
    """Return the class of the agent."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    return AgentFactory.get_agent_class_from_config(AgentConfig(name=importable(request["agent"])))


def importable(name: str) -> str:
    """Return a name that Harbor imports: of a class in a file, that of a module which holds the file's code."""
    file, _, symbol = name.rpartition(":")
    if not file.endswith(".py"):
        return name
    module_name = f"rlcore_file_{Path(file).stem}"
    if module_name not in sys.modules:
        sys.path.append(str(Path(file).resolve().parent))  # for what lies beside it
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return f"{module_name}:{symbol}"


async def run_trial(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a trial, and return its result. SIGTERM cancels it. What Harbor raises before the trial begins becomes the answer's
    `not_started`."""
    from harbor.trial.trial import Trial

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        trial = await Trial.create(trial_config(request))
    except Exception as error:
        return {"not_started": described(error)}
    text = (await trial.run()).model_dump_json(include=RESULT)
    result: dict[str, Any] = json.loads(text.replace(f"{trial.paths.trial_dir}/", ""))  # equal reasons are counted together
    return result


def look(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version of Harbor, and what is wrong with each part of the request: `agent`, `environment`, and `tasks`, by
    their folders. Neither is looked at with a version that is too old."""
    try:
        import harbor  # noqa: F401
    except ImportError as error:
        return {"missing": str(error)}
    from importlib.metadata import version

    found = version("harbor")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < MINIMUM:  # a release candidate is its release
        return {"version": found, "expected": ".".join(map(str, MINIMUM))}
    parts = {"agent": partial(look_at_agent, request), "environment": partial(look_at_environment, request)}
    problems = dict(failed(parts))
    tasks = dict(failed({folder: partial(look_at_task, folder) for folder in request["tasks"]}))
    return {"version": found, "problems": problems, "tasks": tasks}


def failed(parts: Mapping[str, Callable[[], None]]) -> Iterator[tuple[str, str]]:
    """Yield the name of each part whose function raises, and what it raises. Harbor raises SystemExit, too."""
    for name, check in parts.items():
        try:
            check()
        except (Exception, SystemExit) as error:
            yield name, described(error)


def look_at_agent(request: Mapping[str, Any]) -> None:
    """Raise what Harbor raises of the agent or its options."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    AgentFactory.run_preflight(AgentConfig(**agent_fields(request)))


def look_at_environment(request: Mapping[str, Any]) -> None:
    """Raise what Harbor raises of the environment, such as of a Docker daemon that does not run."""
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.trial.config import EnvironmentConfig

    name = importable(request["environment"])
    config = EnvironmentConfig(**{"import_path" if ":" in name else "type": name})
    EnvironmentFactory.run_preflight(config.type, config.import_path, request["environment_options"])


def look_at_task(folder: str) -> None:
    """Raise what is wrong with a task, such as missing tests."""
    from harbor.models.task.task import Task

    task = Task(folder)
    steps = [step.name for step in task.config.steps or []]
    if not all(text.strip() for text in ([task.step_instruction(name) for name in steps] or [task.instruction])):
        raise ValueError("its instruction is empty")


def described(error: BaseException) -> str:
    """Return an error in words. SystemExit has its text alone."""
    return str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"


def answer(connection: socket.socket, request: Mapping[str, Any], output: IO[bytes]) -> None:
    """Answer a request in a process of its own, whose output goes to a file."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(request["variables"])
    # asyncio.run would wait for threads of an agent that was cancelled.
    found = asyncio.new_event_loop().run_until_complete(run_trial(request)) if "task" in request else look(request)
    connection.sendall(f"{json.dumps(found)}\n".encode())


def attend(connection: socket.socket, descendants: ModuleType) -> None:
    """Fork the process that answers, and wait for its end. Whatever it has started ends with it."""
    is_stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: is_stopped.append(True))
    os.setsid()
    descendants.adopt_orphans()
    request = json.loads(connection.makefile().readline())
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        request["trials_folder"] = request.get("trials_folder") or folder
        if (process := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run_and_exit(answer, connection, request, output)
        deadline = math.inf
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            if math.isinf(deadline) and (select.select([connection], [], [], POLL_S)[0] or is_stopped):  # nothing but its end
                os.kill(process, signal.SIGTERM)  # once: a second one would cancel the removal of the container
                deadline = time.monotonic() + STOP_S
            elif time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
            elif not math.isinf(deadline):
                time.sleep(POLL_S)
        descendants.end_descendants(os.getpid())
        if code := os.waitstatus_to_exitcode(ended[1]):
            output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN_BYTES))
            last = {"exit_code": code, "output": output.read().decode(errors="replace").strip()}
            with suppress(OSError):
                connection.sendall(f"{json.dumps(last)}\n".encode())


def run_and_exit(work: Callable[..., None], *arguments: Any) -> None:
    """Do the work of a forked process, and end it. Threads of clients do not hold it."""
    try:
        work(*arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def serve(listener: socket.socket, descendants: ModuleType) -> None:
    """Fork a process for each connection, until the end of standard input. Those under way are then stopped."""
    processes, watched = set[int](), list[Any]((listener, 0))
    while True:
        ready, _, _ = select.select(watched, [], [], 1.0)
        processes = {one for one in processes if os.waitpid(one, os.WNOHANG)[0] == 0}
        if 0 in ready and not os.read(0, 1):
            break
        if listener in ready:
            connection, _ = listener.accept()
            if (process := os.fork()) == 0:
                listener.close()
                run_and_exit(attend, connection, descendants)
            connection.close()
            processes.add(process)
    for process in processes:
        os.kill(process, signal.SIGTERM)
    for process in processes:
        os.waitpid(process, 0)


def prepare(options: Mapping[str, Any]) -> None:
    """Import what all trials need. A request reports what does not load."""
    with suppress(Exception):
        import harbor.llms.litellm_config
        import harbor.trial.trial  # noqa: F401
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.trial.config import EnvironmentConfig

        agent_class(options)
        name = importable(options["environment"])
        config = EnvironmentConfig(**{"import_path" if ":" in name else "type": name})
        EnvironmentFactory.get_environment_class(config.type, config.import_path)
    gc.collect()
    gc.freeze()  # the trials share what is never looked at again


def main() -> None:
    """Serve the socket that the first argument names."""
    spec = importlib.util.spec_from_file_location("descendants", sys.argv[2])
    assert spec is not None
    assert spec.loader is not None
    descendants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(descendants)
    sys.path.insert(0, os.getcwd())
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: `serve` waits for the descriptor's end
        line += os.read(0, 1) or b"\n"
    prepare(json.loads(line))
    serve(socket.socket(fileno=int(sys.argv[1])), descendants)


if __name__ == "__main__":
    main()
