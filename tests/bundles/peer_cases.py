"""A small step with ratios far from 1, under the options of several algorithms."""

from typing import Any

import attrs
import numpy as np
import torch
from attrs import evolve

from rlcore_bundles.compared_batch import ComparedBatch, Rows
from rlcore_bundles.own_side import OwnSide
from rlcore_bundles.peers.contract import Samples, Setup, Update
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.presets import CispoConfig, DrGrpoConfig, GspoConfig, RlooConfig, SapoConfig

LENGTHS = (3, 5, 2, 4, 5, 1, 4, 3)
SAMPLES_PER_PROMPT = 4
CORRECTED: dict[str, Any] = {"previous_logprobs": "trainer"}
KL: dict[str, Any] = {"kl_coefficient": 0.1}
CASES: dict[str, Any] = {
    "grpo": GrpoConfig(**CORRECTED),
    "grpo with KL": GrpoConfig(**CORRECTED, **KL),
    "grpo by sequence": GrpoConfig(**CORRECTED, loss_normalisation="sequence", importance_correction="none"),
    "dr_grpo": DrGrpoConfig(**CORRECTED, constant_length=8),
    "dapo": GrpoConfig(**CORRECTED, clip_high=0.28, dual_clip=3.0),
    "gspo": GspoConfig(**CORRECTED, importance_correction="none"),
    "rloo": RlooConfig(**CORRECTED, importance_correction="none", clip_low=0.4, clip_high=0.4),
    "entropy": GrpoConfig(**CORRECTED, loss_normalisation="sequence", entropy_coefficient=0.01),
    "cispo": CispoConfig(**CORRECTED),
    "sapo": SapoConfig(**CORRECTED),
}


def options_of(name: str) -> dict[str, Any]:
    """The options of a case, as a bundle records them."""
    found = attrs.asdict(CASES[name])
    return {key: value for key, value in found.items() if key != "reward_weights"} | {"reward_weights": {}}


def batch_of_case(name: str, **options: Any) -> ComparedBatch:
    """The step under a case's options."""
    return batch_with({**options_of(name), **options})


def batch_with(options: dict[str, Any]) -> ComparedBatch:
    """The step under some options: two groups of four, ratios from 0.2 to 9, a truncated sample."""
    random = np.random.default_rng(7)
    count, width = len(LENGTHS), max(LENGTHS)
    mask = np.arange(width) < np.array(LENGTHS)[:, None]
    mask[1, 2] = False  # a token that the policy did not say

    def column(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.where(mask, values, 0.0).astype(np.float32))

    generation = -random.uniform(0.1, 4.0, (count, width))
    previous = np.minimum(generation + random.normal(0, 0.3, (count, width)), -1e-3)
    current = np.minimum(previous + random.normal(0, 0.8, (count, width)), -1e-3)
    rewards = torch.from_numpy(random.uniform(0, 1, count).astype(np.float32))
    groups = torch.arange(count) // SAMPLES_PER_PROMPT
    truncated = torch.zeros(count, dtype=torch.bool)
    truncated[4] = True
    samples = Samples(rewards=rewards, group_ids=groups, truncated=truncated, mask=torch.from_numpy(mask))
    side = OwnSide(samples=samples, options=options)
    update = Update(
        mask=torch.from_numpy(mask),
        logprobs=column(current),
        previous=column(previous),
        generation=column(generation),
        reference=column(current + random.normal(0, 0.7, (count, width))),
        advantages=side.advantages().float(),
        entropies=torch.zeros(count, width),
        truncated=truncated,
        num_updates=2,
        num_step_tokens=2 * int(mask.sum()),
    )
    rows = Rows(numbers=np.arange(count), starts=np.zeros(count, np.int64), mask=mask)
    setup = Setup(options=options, samples_per_prompt=SAMPLES_PER_PROMPT, max_response_tokens=8, masks_truncated=False)
    recorded = evolve(side, recorded=side.advantages(), update=update)
    return ComparedBatch(own=recorded, setup=setup, sample_rows=rows, update_rows=rows, reasons={})
