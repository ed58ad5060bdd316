"""The table `[receipts]` of a recipe."""

from typing import Annotated, Literal, TypeAlias

from attrs import frozen

from rlcore.schema.constraints import Count, Positive, above, at_least, between

TurnedOffBy0: TypeAlias = Annotated[int, at_least(0, "0 turns it off.")]


@frozen(kw_only=True)
class ReceiptsConfig:
    """`[receipts]`: sequences of random steps, whose log-probabilities transformers computes again in float32 on CPU, in a
    process of its own. The figures are the metrics `receipts/NAME` of that step, in metrics.jsonl and in sinks. They come some
    steps later."""

    every_n_steps: TurnedOffBy0 = 100
    """Mean distance between such steps. The run's seed draws each step with a probability of 1/n; 0 draws none."""
    num_sequences: Positive = 4
    """Most sequences of such a step that are computed again, drawn at random."""
    max_tokens: Positive = 4096
    """Most tokens of a sequence that are computed again, from its beginning."""
    max_mean_difference: Annotated[float, above(0)] | None = None
    """Greatest mean distance in nats of the trainer's or the generator's log-probabilities from those that are computed again.
    None is 1e-4 for a model in float32, and 0.05 for another dtype."""
    on_excess: Literal["warn", "error"] = "warn"
    """The action on a difference beyond that bound, or a refit of another tensor than the trainer's: a note that names the
    cause ("warn"), or the end of the run ("error")."""
    num_threads: Annotated[int, between(1, 1024)] = 2
    """Threads of the process that computes."""
    max_waiting: Count = 1
    """Most steps that wait for that process, each with a copy of the model on disk. A further step is not computed again, and a
    note says so."""
