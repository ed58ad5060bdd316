"""Options of the environment `harbor`."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from rlcore.schema.constraints import FileText, Finite, FunctionText, PathText, Positive, Seconds, Text

SECTION = "environment.harbor"


@frozen(kw_only=True)
class HarborConfig:
    """`[environment.harbor]`: tasks of Harbor, the agent that solves them, and where its trials run."""

    tasks: FileText | None = None
    """A folder of tasks to train on, or the folder of one task. None: rows come from the recipe's data, and the field
    `task_field` of each names the folder of a task."""
    evaluation_tasks: FileText | None = None
    """A folder of tasks held out, or the folder of one task."""
    task_field: Text = "task"
    """The field of a row that names the folder of its task."""
    agent: FunctionText = "terminus-2"
    """Name of an agent of Harbor, or a class as "agent.py:Agent" or "package.module:Agent"."""
    agent_options: Mapping[str, Any] = field(factory=dict)
    """Options of the agent, by the names that Harbor gives them, such as max_turns."""
    environment: FunctionText = "docker"
    """Harbor's name of the environment in which a task runs, such as docker or daytona, or a class as
    "environment.py:Environment" or "package.module:Environment"."""
    environment_options: Mapping[str, Any] = field(factory=dict)
    """Options of the environment, by the names that Harbor gives them."""
    python: PathText | None = None
    """The interpreter of a Python environment with Harbor. None: that of the run."""
    pass_environment: tuple[Text, ...] = ()
    """Names of further environment variables of the run that trials get, such as DAYTONA_API_KEY or DOCKER_HOST."""
    agent_timeout_s: Seconds | None = None
    """Most seconds in which an agent works on a task. None: as the task says."""
    verifier_timeout_s: Seconds | None = None
    """Most seconds of a verifier. None: as the task says."""
    on_agent_timeout: Literal["mask", "train"] = "mask"
    """Mask an episode whose agent's time is over out of training, or train on it with the verifier's reward."""
    reward_key: Text = "reward"
    """The name of the reward among several of a verifier."""
    success_reward: Finite = 1.0
    """The reward from which on a task counts as solved."""
    trials_folder: PathText | None = None
    """A folder that keeps Harbor's folder of each trial, for `harbor view`. None: it is removed with its trial."""
    max_concurrent: Positive = 8
    """Most trials at once."""
