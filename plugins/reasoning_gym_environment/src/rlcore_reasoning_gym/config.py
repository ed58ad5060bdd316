"""The recipe section `[environment.reasoning_gym]`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Count, Positive, above, at_least

_TAG = Constraint("of letters, digits and underscores", lambda value: value.isidentifier())
_EACH_ONCE = Constraint("each once", lambda value: len(set(value)) == len(value))


@frozen(kw_only=True)
class FamilyConfig:
    """`[environment.reasoning_gym.families.NAME]`: a family of problems."""

    weight: Annotated[float, above(0)] = 1.0
    """How many of the rows are of this family, in proportion to the other families' weights."""
    levels: Annotated[tuple[Count, ...], _EACH_ONCE] = ()
    """Levels of difficulty by the family's own curriculum, 0 the easiest; each row is of one of them, with equal chances.
    None: the family's own defaults."""
    options: Mapping[str, Any] = field(factory=dict)
    """Options of the family, by the names that reasoning-gym gives them, such as max_terms; they overrule those of a level."""


@frozen(kw_only=True)
class ReasoningGymConfig:
    """`[environment.reasoning_gym]`: problems that reasoning-gym makes and scores."""

    families: Mapping[str, FamilyConfig] = field(factory=dict)
    """The families that rows are of, by the names of reasoning-gym, such as chain_sum; one at least."""
    num_train: Positive = 5000
    """Rows to train on."""
    num_evaluation: Positive = 200
    """Rows held out; no row to train on has the question of one of them."""
    problem_seed: int = 0
    """The seed of the problems. It is not run.seed, so that runs with different seeds, and a warm start before them, all
    hold out the same problems."""
    answer_from: Literal["tag", "last_line", "response"] = "tag"
    """The place of the answer in a response. "tag": between the last `<answer>` and `</answer>`; "last_line": the last line
    that is not empty, for families whose answers have one line; "response": all of it."""
    answer_tag: Annotated[str, _TAG] = "answer"
    """The tag of answer_from = "tag"."""
    thought_in_prompt: bool = False
    """True where the prompt begins a thought and ends in other text than `<think>`, such as `<think>\\nOkay`. An answer then
    counts only after the thought's end. rlcore sees a prompt that ends in the mark itself."""
    instruction: str | None = None
    """The text below the question. None: a sentence that asks for the answer where answer_from looks for it."""
    prompt_format: Literal["text", "chat"] = "chat"
    """"chat": the question is a user's message for the chat template. "text": it is the prompt itself."""
    system_prompt: str | None = None
    """A system message before it; only for "chat"."""
    scoring_timeout_s: Annotated[float, at_least(0.1)] = 5.0
    """Most seconds of a processor's time to score one response; one that takes longer earns nothing and is counted as
    `environment/scoring_timed_out`."""
    num_processes: Positive | None = None
    """Processes that score responses, one response each at a time; none: one for each core that the run may use, at most 32."""
    max_memory_mib: Annotated[int, at_least(512)] = 2048
    """Most memory of each, in MiB."""


def num_processes(config: ReasoningGymConfig) -> int:
    """How many responses are scored at once."""
    if config.num_processes is not None:
        return config.num_processes
    from rlcore_workers.pool import default_processes  # which listing the plugins does not need

    return default_processes()
