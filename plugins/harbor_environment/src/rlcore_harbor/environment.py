"""The environment `harbor`: an agent of Harbor solves a task in each episode, and the task's verifier rewards it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.spi import EnvironmentContext, EpisodeResult, RewardError, Row, SessionEndpoint, fails_as
from rlcore_harbor.config import SECTION, HarborConfig
from rlcore_harbor.results import episode_result
from rlcore_harbor.tasks import read_rows, task_of
from rlcore_harbor.trial_server import ProgramError, TrialServer
from rlcore_serve.agents.variables import session_variables


class HarborBackend:
    """Runs each episode as a trial, in a process of the interpreter that has Harbor."""

    def __init__(self, context: EnvironmentContext, config: HarborConfig) -> None:  # noqa: ARG002 - trials have no seed
        self._config = config
        self._server: TrialServer | None = None

    def rows(self, split: str) -> Sequence[Row] | None:
        """Return a row for each task; None where rows come from the recipe's data."""
        name = "tasks" if split == "train" else "evaluation_tasks"
        folder: str | None = getattr(self._config, name)
        return None if folder is None else read_rows(folder, f"{SECTION}.{name}", self._config.task_field)

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:  # noqa: ARG002
        """Run a trial. DataError for a row that names no task, RewardError where a process fails."""
        kept = self._config.trials_folder
        request = {
            "task": str(task_of(row, self._config.task_field).absolute()),
            "trials_folder": None if kept is None else str(expanded(kept).absolute()),
        }
        try:
            answer = await self._running().ask(request, session_variables(session, self._config.pass_environment))
        except ProgramError as error:
            with fails_as("infrastructure" if error.is_killed else "environment"):
                raise RewardError(str(error)) from error
        except OSError as error:
            raise RewardError(f"the interpreter {self._config.python} does not start: {error}") from error
        return episode_result(answer, self._config)

    def close(self) -> None:
        """Cancel the trials under way, and wait until their containers are removed."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _running(self) -> TrialServer:
        """Return the server, a new one where there is none or it has ended."""
        if self._server is not None and not self._server.is_running:
            self.close()
        if self._server is None:
            self._server = TrialServer(self._config.python, self._config.pass_environment, trial_options(self._config))
        return self._server


def trial_options(config: HarborConfig) -> Mapping[str, Any]:
    """Return what all requests have in common."""
    return {
        "agent": config.agent,
        "agent_options": dict(config.agent_options),
        "environment": config.environment,
        "environment_options": dict(config.environment_options),
        "agent_timeout_s": config.agent_timeout_s,
        "verifier_timeout_s": config.verifier_timeout_s,
    }
