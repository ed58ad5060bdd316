"""Options of the environment `openenv`."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Finite, Positive, Seconds, Text, between

FIRST_EVALUATION_SEED = 10**9
"""Seeds of the evaluation's rows begin here, those of training at 0: the two never meet."""


@frozen(kw_only=True)
class OpenEnvConfig:
    """`[environment.openenv]`: servers of an OpenEnv environment, and what stands between them and the policy."""

    urls: tuple[str, ...] = ()
    """Addresses of the servers, as "http://localhost:8000". Each episode goes to the one with the fewest."""
    max_concurrent: Positive = 1
    """Most episodes at once on each server: what the server was started with as `max_concurrent_envs`, 1 unless stated."""
    connect_timeout_s: Seconds = 30.0
    """Most seconds to reach a server, and to wait for room on one that is full."""
    num_train: Annotated[int, between(0, FIRST_EVALUATION_SEED)] = 0
    """Rows to train on that are seeds alone, which the server is reset with. 0: all rows come from the recipe's data."""
    num_evaluation: Positive = 100
    """Held-out rows that are only seeds, none of them a training seed; where `num_train` is not 0."""
    reset_fields: tuple[str, ...] | None = None
    """Fields of a row that the server is reset with, besides the seed. None: all."""
    system_prompt: str | None = None
    """A system message at the beginning of each episode."""
    prompt_field: str | None = None
    """Field of a row with a text that the policy reads before the first observation."""
    observation_fields: tuple[str, ...] = ()
    """Fields of an observation that the policy reads: one text as it is, anything else as JSON. None named: all of them."""
    observation_function: str | None = None
    """A `def show(observation)` that returns the text for the policy, as "game.py:show" or "package.module:show", in place of
    `observation_fields`."""
    action: Literal["text", "json", "tools", "function"] = "text"
    """How an answer becomes an action. "text": the answer is the field `action_field`. "json": the last JSON object in it is
    the action. "tools": its calls are those of the server's MCP tools. "function": what `action_function` returns."""
    action_field: Text = "message"
    """The field of the action that is the answer; for "text"."""
    action_function: str | None = None
    """A `def act(answer, observation)` that returns the action, a mapping, or None where there is none in the answer; for
    "function"."""
    max_turns: Positive = 16
    """Most answers in an episode."""
    reward: Literal["sum", "last"] = "sum"
    """The reward of an episode from those of its steps. "sum": their sum. "last": the last that is a number."""
    success_reward: Finite = 1.0
    """The reward from which on an episode counts as solved."""
    on_invalid_action: Literal["tell", "end"] = "tell"
    """Handling of an answer without an action, or with one that does not fit the server's schema. "tell": the policy reads the
    error and goes on. "end": the episode ends."""
    invalid_action_reward: Finite = 0.0
    """The reward of such an answer."""
