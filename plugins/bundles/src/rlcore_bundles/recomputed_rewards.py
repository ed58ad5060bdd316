"""The rewards of a bundle's samples, by its environment once more."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.run.data.text import tokenizers
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import WEIGHT_VERSIONS, FinishReason, Turn
from rlcore.spi.arrays import Float32Array
from rlcore_bundles.bundle import Bundle
from rlcore_rollout.environment_results import Failure
from rlcore_rollout.environment_runner import EpisodeRunner


@frozen(kw_only=True, eq=False)
class Rewards:
    """The rewards of N samples."""

    rewards: Float32Array
    """float32 [N]; NaN where the environment failed."""
    components: Mapping[str, Float32Array]
    failures: Mapping[int, str]
    """The cause of each failure, by the sample's number."""


def reason_to_skip(bundle: Bundle, plan: RunPlan) -> str:
    """Return why the environment cannot judge the samples again; "" where it can."""
    if bundle.prompts != "kept" or not bundle.sampled.rows:
        return f"the bundle's prompts are {bundle.prompts}" if bundle.prompts != "kept" else "the bundle has no rows"
    if plan.runs_agents:
        return "agents run their episodes themselves"
    if bundle.sampled.turns is not None:
        return "episodes of several turns are not repeated"
    return ""


def recomputed_rewards(bundle: Bundle, plan: RunPlan) -> Rewards:
    """Have the environment judge every sample again."""
    assert plan.environment is not None
    sampled = bundle.sampled
    runner = EpisodeRunner(plan.environment, plan.recipe.rollout.environment_timeout_s, "mask")
    try:
        begun = runner.reset_all(sampled.rows, sampled.reset_seeds)
        groups = sampled.group_ids.tolist()
        numbers = [number for number, group in enumerate(groups) if not isinstance(begun[group], Failure)]
        turns = dict(enumerate(_turns(plan, sampled)))
        states: list[Any] = [getattr(begun[groups[number]], "state", None) for number in numbers]
        results = dict(zip(numbers, runner.step_all(states, [turns[number] for number in numbers]), strict=True))
    finally:
        runner.close()
    failures = {number: reset.reason for number, group in enumerate(groups) if isinstance(reset := begun[group], Failure)}
    failures |= {number: one.reason for number, one in results.items() if isinstance(one, Failure)}
    rewards = np.full(len(groups), np.nan, np.float32)
    components = {name: np.zeros(len(groups), np.float32) for name in sampled.reward_components}
    for number, result in results.items():
        if isinstance(result, Failure):
            continue
        rewards[number] = result.reward
        for name, column in components.items():
            column[number] = result.reward_components.get(name, 0.0)
    return Rewards(rewards=rewards, components=components, failures=failures)


def _turns(plan: RunPlan, sampled: CollectedRollouts) -> Iterator[Turn]:
    """Yield the answer of each sample, as its episode gave it to the environment."""
    batch = sampled.batch
    generated = batch.token_columns[WEIGHT_VERSIONS] >= 0
    said = [batch.tokens[start:end][generated[start:end]] for start, end in pairwise(batch.offsets.tolist())]
    texts = tokenizers().load_tokenizer(plan.recipe.model).decode_batch(said)
    for tokens, text, reason in zip(said, texts, sampled.finish_reasons.tolist(), strict=True):
        yield Turn(text=text, tokens=tokens, finish_reason=FinishReason(reason), content=text)
