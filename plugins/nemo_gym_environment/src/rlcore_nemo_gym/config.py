"""Options of the environment `nemo_gym`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import Finite, PathText, Positive, Seconds, Text, between

SECTION = "environment.nemo_gym"


@frozen(kw_only=True)
class NemoGymConfig:
    """`[environment.nemo_gym]`: agent servers of NeMo Gym, and where their model server finds the policy."""

    train_files: tuple[PathText, ...] = ()
    """JSONL files of NeMo Gym with the rows to train on. None named: rows come from the recipe's data."""
    evaluation_files: tuple[PathText, ...] = ()
    """JSONL files of NeMo Gym with the rows held out."""
    head_url: Text = "http://127.0.0.1:11000"
    """Address of NeMo Gym's head server, which knows where each agent server is."""
    agent: str | None = None
    """Name of the agent server that runs every episode. None: the one that a row's `agent_ref` names."""
    agent_url: str | None = None
    """Address of the agent server that runs every episode, in place of asking the head server."""
    policy_host: Text = "127.0.0.1"
    """Address of this machine at which NeMo Gym's model server finds the policy; "0.0.0.0" for servers on other machines."""
    policy_port: Annotated[int, between(1, 65535)] = 8790
    """Port there: the model server has `openai_base_url: http://HOST:PORT/v1`."""
    leave_out: tuple[str, ...] = ("model", "temperature", "top_p", "parallel_tool_calls")
    """Keys of a row's `responses_create_params` that the agent does not get: the recipe sets the sampling, and an answer may
    have several calls."""
    developer_as_system: bool = True
    """Whether messages with the role `developer` reach the chat template as the role `system`: most templates know no other."""
    metrics: tuple[str, ...] = ()
    """Fields of the agent server's reply, numbers or true and false, that become metrics of these names."""
    success_reward: Finite = 1.0
    """The reward from which on an episode counts as solved."""
    max_concurrent: Positive = 64
    """Most episodes at once."""
    connect_timeout_s: Seconds = 30.0
    """Most seconds to reach a server."""
