"""The recipe sections `[environment.arithmetic]`, `[environment.calculator]` and `[environment.math]`."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Count, Positive, at_least, at_least_below

_ONCE_EACH = Constraint("each once, and one at least", lambda value: bool(value) and len(set(value)) == len(value))
PROBLEM = "{problem}"
"""The placeholder in the instruction of `[environment.math]`."""


@frozen(kw_only=True)
class ProblemConfig:
    """Which problems there are: sums, differences and products of whole numbers."""

    operations: Annotated[tuple[Literal["+", "-", "*"], ...], _ONCE_EACH] = ("+",)
    """Any of "+", "-" and "*", with equal chances; "*" binds tighter."""
    num_terms: Annotated[int, at_least(2)] = 2
    """Operands of a problem."""
    min_operand: Count = 0
    """Smallest operand, not negative."""
    max_operand: Count = 99
    """Largest operand."""
    num_train: Positive = 5000
    """Different problems to train on."""
    num_evaluation: Positive = 200
    """Different problems held out. No training problem equals one of them, also not after reordering its summands (with their
    signs) or factors."""
    problem_seed: int = 0
    """The seed of the problems. It is not run.seed, so that runs with different seeds, and a warm start before them,
    all hold out the same problems."""


@frozen(kw_only=True)
class CalculatorConfig(ProblemConfig):
    """`[environment.calculator]`: such problems, for a policy that has a tool to work them out."""

    system_prompt: str | None = None
    """A system message before the problem."""
    call_reward: Annotated[float, at_least_below(0, 1, "A right answer earns 1.")] = 0.0
    """Reward of the first turn that calls the calculator with an expression that it can work out; the answer earns the rest
    of 1."""


@frozen(kw_only=True)
class ArithmeticConfig(ProblemConfig):
    """`[environment.arithmetic]`: sums, differences and products of whole numbers, answered exactly."""

    prompt_format: Literal["text", "chat"] = "text"
    """"text": the prompt is "37+58=". "chat": it is that, as a user's message for the chat template."""
    partial_credit: Annotated[float, at_least_below(0, 1, "A right answer earns 1.")] = 0.0
    """Reward of a wrong whole number: this, times the share of the answer's digits that are right, counted from the last. 0.0
    rewards exact answers alone. It must be below 1.0."""


@frozen(kw_only=True)
class MathConfig:
    """`[environment.math]`: problems whose answers are checked by math-verify; they come from `[data]`."""

    answer_field: str = "answer"
    """Field with the answer, also one in a struct, as "reward_model.ground_truth": a number or LaTeX by itself, a solution that
    ends in "#### 42" as in GSM8K, or one with a \\boxed{} in it."""
    instruction: str = "{problem}\n\nReason step by step, and put the final answer within \\boxed{}."
    """The question; {problem} stands for the row's prompt. A prompt that is a list of messages is used as it is."""
    prompt_format: Literal["text", "chat"] = "chat"
    """"chat": the instruction is a user's message for the chat template. "text": it is the prompt itself."""
    system_prompt: str | None = None
    """A system message before it; only for "chat"."""
    require_boxed: bool = False
    """Only an answer within \\boxed{} counts; else the last expression of a response without a box does too. Of several boxes
    the last one counts; one that is empty or never closed is none."""
    thought_in_prompt: bool = False
    """True where the prompt begins a thought and ends in other text than `<think>`, such as `<think>\\nOkay`. An answer then
    counts only after the thought's end. rlcore sees a prompt that ends in the mark itself. Text between `<think>` and
    `</think>`, or other families' marks, never counts."""
    verification_timeout_s: Annotated[float, at_least(0.1)] = 3.0
    """Most CPU seconds to check one response, also on a busy machine. A slower one is wrong and counted as
    `environment/verification_timed_out`."""
    num_processes: Positive | None = None
    """Processes that check responses, one response each at a time; none: one for each core that the run may use, at most 32."""
    max_memory_mib: Annotated[int, at_least(512)] = 2048
    """Most memory of each, in MiB."""


def num_processes(config: MathConfig) -> int:
    """How many responses are checked at once."""
    if config.num_processes is not None:
        return config.num_processes
    from rlcore_workers.pool import default_processes  # which listing the plugins does not need

    return default_processes()
