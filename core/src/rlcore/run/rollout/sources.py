"""Where a step's samples come from, and how the held-out set is measured."""

from collections.abc import Iterator, Sequence

from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.run.data.datasets import PromptStream, Split
from rlcore.run.data.prompts import Demonstrations, demonstration_batch
from rlcore.run.data.seeds import Stream
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.protocols import CollectedRollouts, GeneratorGroup
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import RolloutCollector
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode_starts import PromptLimit
from rlcore.run.rollout.metrics import evaluation_metrics
from rlcore.spi import RolloutBatch, Row, SamplingParams
from rlcore.spi.arrays import Int64Array


def collector_of(
    recipe: Recipe,
    split: Split,
    generator: GeneratorGroup,
    episodes: EpisodeRunner,
    tokenizer: Tokenizer,
    clock: PhaseClock,
    progress: Progress,
) -> RolloutCollector:
    """What samples the prompts of a data set: as the recipe's `[rollout]` says, or for held-out ones its `[evaluation]`."""
    trains = split == "train"
    rollout, options = recipe.rollout, recipe.rollout if trains else recipe.evaluation
    stops = tokenizer.stop_token_ids if rollout.stop_token_ids is None else rollout.stop_token_ids
    drops = getattr(recipe.data, split).on_long_prompt == "drop"
    return RolloutCollector(
        generator=generator,
        episodes=episodes,
        tokenizer=tokenizer,
        sampling=SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop_token_ids=stops,
            stop_strings=rollout.stop_strings,
        ),
        samples_per_prompt=options.samples_per_prompt,
        prompt_limit=PromptLimit(max_tokens=rollout.max_prompt_tokens, drops=drops, key=f"data.{split}"),
        max_response_tokens=rollout.max_response_tokens,
        max_turns=rollout.max_turns,
        max_failed_fraction=rollout.max_failed_fraction,
        purpose="the step" if trains else "the evaluation",
        routed_experts=rollout.replay_routing and trains,
        clock=clock,
        progress=progress,
    )


@frozen(kw_only=True, eq=False)
class RolloutSource:
    """Rewarded samples of the present policy."""

    collector: RolloutCollector
    rows: Sequence[Row]
    kept: Int64Array
    """int64 [P]: the rows within the limits."""
    stream: PromptStream
    seed: int

    def sample(self, step: int, weight_version: int) -> CollectedRollouts:
        """The samples of step `step`, counted from 1: determined by seed, step and weights."""
        rows = [self.rows[int(index)] for index in self.kept[self.stream.indices(step - 1)]]
        return self.collector.collect(rows, weight_version, (self.seed, Stream.ROLLOUTS, step), self._following(step))

    def _following(self, step: int) -> Iterator[Row]:
        """One whole pass over the data from behind a step's rows. The next step begins there all the same: what a step takes
        follows from its number, whatever was left out before."""
        for index in self.kept[self.stream.following(step - 1)]:
            yield self.rows[int(index)]


@frozen(kw_only=True, eq=False)
class DemonstrationSource:
    """Source of batches from prompt/completion pairs."""

    demonstrations: Demonstrations
    stream: PromptStream

    def sample(self, step: int, weight_version: int) -> RolloutBatch:  # noqa: ARG002 - no policy is asked
        """The demonstrations of step `step`, counted from 1."""
        return demonstration_batch(self.demonstrations, self.stream.indices(step - 1))


@frozen(kw_only=True, eq=False)
class HeldOutEvaluator:
    """pass@1 on the held-out rows; the same draws at every evaluation, so that curves differ by the weights alone."""

    collector: RolloutCollector
    rows: Sequence[Row]
    kept: Int64Array
    """int64 [P]: the rows within the limits."""
    seed: int

    def evaluate(self, weight_version: int) -> dict[str, float]:
        """Return the metrics of an evaluation, named `evaluation/…`."""
        rows = [self.rows[int(index)] for index in self.kept]
        collected = self.collector.collect(rows, weight_version, seed=(self.seed, Stream.EVALUATION))
        return evaluation_metrics(collected)
