"""Writes trl_numbers.json: losses, gradients and advantages as TRL's own code computes them, for test_trl_numbers.py.

    python tests/grpo/make_trl_numbers.py

needs trl 1.16.0, which nothing else here does. GRPOTrainer._compute_loss and RLOOTrainer._compute_loss are called as they are,
on a trainer that was never initialised: its options are set one by one, and its model's log-probabilities are the columns
below. Advantages, and the weights for the generator, are made by the statements of _generate_and_score_completions that make
them.
"""

import importlib
import inspect
import itertools
import json
import math
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

LENGTHS = [5, 3, 6, 1, 4, 2]
"""Tokens of each completion."""
WIDTH = max(LENGTHS)
TRAINER = {"previous_logprobs": "trainer", "importance_correction": "none"}
"""rlcore's options of every case."""

DEFAULTS = {
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "max_completion_length": WIDTH,
    "current_gradient_accumulation_steps": 1,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "aux_loss_enabled": False,
}
ARGS = {
    "delta": None,
    "use_bias_correction_kl": True,
    "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}

TOKEN = {"loss_normalisation": "token"}
SEQUENCE = {"loss_normalisation": "sequence"}
VLLM = {"loss_type": "dapo", "use_vllm": True}
CASES = {
    "grpo": ({"loss_type": "grpo"}, SEQUENCE),
    "bnpo": ({"loss_type": "bnpo"}, TOKEN),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {**TOKEN, "clip_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_normalisation": "constant", "constant_length": WIDTH}),
    "two-sided": ({"loss_type": "dapo", "delta": 1.4}, {**TOKEN, "dual_clip": 1.4}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2},
        {**SEQUENCE, "ratio": "sequence", "clip_low": 0.1, "clip_high": 0.2},
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2},
        {"loss_normalisation": "constant", "constant_length": 1, "ratio": "sequence", "clip_low": 0.1, "clip_high": 0.2},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.25},
        {**TOKEN, "objective": "cispo", "clip_low": 1.0, "clip_high": 0.25},
    ),
    "sapo": ({"loss_type": "sapo"}, {**SEQUENCE, "objective": "sapo"}),
    "vespo": ({"loss_type": "vespo"}, {**TOKEN, "objective": "vespo"}),
    "vespo, weighed": (
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_clip_max": 1.25},
        {**TOKEN, "objective": "vespo", "importance_correction": "token", "importance_maximum": 1.25},
    ),
    "kl": (
        {"loss_type": "dapo", "beta": 0.25, "use_bias_correction_kl": False},
        {**TOKEN, "kl_coefficient": 0.25, "kl_gradient": "estimate"},
    ),
    "kl, bias corrected": (
        {"loss_type": "dapo", "beta": 0.25},
        {**TOKEN, "kl_coefficient": 0.25, "kl_importance": "previous"},
    ),
    "gspo, kl bias corrected": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.1,
            "epsilon_high": 0.2,
            "beta": 0.25,
        },
        {
            **SEQUENCE,
            "ratio": "sequence",
            "clip_low": 0.1,
            "clip_high": 0.2,
            "kl_coefficient": 0.25,
            "kl_importance": "ratio",
        },
    ),
    "cispo, capped below 1": (
        {"loss_type": "cispo", "epsilon_high": 0.75},
        {**TOKEN, "objective": "cispo", "clip_low": 1.0, "clip_high": -0.25},
    ),
    "off-policy mask": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.125},
        {**TOKEN, "off_policy_maximum": 0.125},
    ),
    "top entropy": (
        {"loss_type": "dapo", "top_entropy_quantile": 0.4, "beta": 0.25},
        {**TOKEN, "kl_coefficient": 0.25, "kl_importance": "previous"},
    ),
    "entropy bonus": ({"loss_type": "dapo", "entropy_coef": 0.125}, {**TOKEN, "entropy_coefficient": 0.125}),
    "token truncate": (
        {**VLLM, "vllm_importance_sampling_clip_max": 1.25, "vllm_importance_sampling_clip_min": 0.75},
        {**TOKEN, "importance_correction": "token", "importance_maximum": 1.25, "importance_minimum": 0.75},
    ),
    "token mask": (
        {
            **VLLM,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": 1.5,
            "vllm_importance_sampling_clip_min": 0.75,
        },
        {
            **TOKEN,
            "importance_correction": "token",
            "importance_bound": "mask",
            "importance_maximum": 1.5,
            "importance_minimum": 0.75,
        },
    ),
    "sequence truncate": (
        {**VLLM, "vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.125},
        {**TOKEN, "importance_correction": "sequence", "importance_maximum": 1.125},
    ),
    "sequence mask": (
        {**VLLM, "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5},
        {**TOKEN, "importance_correction": "sequence", "importance_bound": "mask", "importance_maximum": 1.5},
    ),
    "rloo": (
        {"epsilon_low": 0.4, "epsilon_high": 0.4},
        {**SEQUENCE, "ratio": "sequence_product", "clip_low": 0.4, "clip_high": 0.4},
    ),
}
"""TRL's options and rlcore's, by name."""


NUM_GENERATIONS = 4
REWARD_WEIGHTS = {"right": 1.0, "short": 0.25}
EPSILON = {"advantage_epsilon": 1e-4}
SUMMED = {"multi_objective_aggregation": "sum_then_normalize"}
ADVANTAGE_CASES = {
    "group": ({**SUMMED, "scale_rewards": "group"}, EPSILON),
    "batch": ({**SUMMED, "scale_rewards": "batch"}, {**EPSILON, "advantage_normalisation": "batch_std"}),
    "none": ({**SUMMED, "scale_rewards": "none"}, {"advantage_normalisation": "none"}),
    "gdpo": (
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"},
        {**EPSILON, "reward_aggregation": "normalise_then_sum", "reward_weights": REWARD_WEIGHTS},
    ),
    "rloo": ({"normalize_advantages": False}, {"advantage_baseline": "leave_one_out", "advantage_normalisation": "none"}),
    "rloo, whitened": (
        {"normalize_advantages": True},
        {**EPSILON, "advantage_baseline": "leave_one_out", "advantage_normalisation": "batch_whitening"},
    ),
    "rloo, whitened samples": (
        {"normalize_advantages": True},
        {**EPSILON, "advantage_baseline": "leave_one_out", "advantage_normalisation": "sample_whitening"},
    ),
}
"""TRL's options and rlcore's of advantages, by name."""


def reward_columns():
    """float64 [16, 2]: the rewards of four groups by two functions; in the second all are right, in the last all are equal."""
    random = np.random.default_rng(20261124)
    right = random.integers(0, 2, 16).astype(float)
    right[4:8] = 1.0
    short = np.round(random.normal(0, 1.0, 16) * 1024) / 1024
    right[12:], short[12:] = 0.0, 0.5
    return torch.tensor(np.stack([right, short], 1))


def advantages_of(name, options, rewards):
    """What the statements that make advantages of `rewards_per_func` make of these."""
    trainer = RLOOTrainer if name.startswith("rloo") else GRPOTrainer
    source = inspect.getsource(trainer._generate_and_score_completions)
    begin = source.index("        unscorable_mask = torch.isnan(rewards_per_func)")
    end = source.index("        advantages = torch.nan_to_num(advantages, nan=0.0)")
    weights = torch.tensor(list(REWARD_WEIGHTS.values()), dtype=torch.float64)
    stand_in = SimpleNamespace(
        **options, reward_weights=weights, reward_funcs=[None] * len(weights), reward_clip_range=None, beta=0.0
    )
    names = {
        **vars(importlib.import_module(trainer.__module__)),
        "self": stand_in,
        "rewards_per_func": rewards,
        "num_generations": NUM_GENERATIONS,
        "device": rewards.device,
    }
    exec(textwrap.dedent(source[begin:end]), names)
    return names["advantages"]


def columns():
    """float64 [B, WIDTH] each, whole multiples of 1/1024, so that float32 has them exactly; the mask; advantages [B]."""
    random = np.random.default_rng(20261123)

    def rounded(values):
        return torch.tensor(np.round(values * 1024) / 1024)

    shape = (len(LENGTHS), WIDTH)
    generation = -random.exponential(1.5, shape)
    near = {
        name: rounded(generation + random.normal(0, spread, shape)) for name, spread in (("previous", 0.3), ("reference", 0.5))
    }
    return {
        "generation": rounded(generation),
        **near,
        "current": near["previous"] + rounded(random.normal(0, 0.25, shape)),
        "entropy": rounded(random.exponential(1.0, shape)),
        "mask": torch.tensor([[t < length for t in range(WIDTH)] for length in LENGTHS]).double(),
        "advantages": rounded(random.normal(0, 1.0, len(LENGTHS))),
    }


class Accelerator:
    """One process, which has everything already."""

    num_processes = 1
    sync_gradients = True
    is_main_process = True

    def gather(self, tensor):
        """It is there."""
        return tensor

    def reduce(self, tensor, reduction):
        """It is the sum of one."""
        return tensor

    def pad_across_processes(self, tensor, dim, pad_index):
        """All are as long."""
        return tensor


def trainer_of(cls, options, given, current):
    """A trainer of TRL's that computes `current` as its model's log-probabilities."""
    trainer = object.__new__(cls)
    args = {name: options.get(name, value) for name, value in ARGS.items()}
    values = {**DEFAULTS, **{name: value for name, value in options.items() if name not in ARGS}}
    trainer.__dict__.update(values)
    trainer.args = SimpleNamespace(**args)
    trainer.accelerator = Accelerator()
    trainer.model = SimpleNamespace(training=True)
    trainer.__dict__.update(
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=bool(values["entropy_coef"]),
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, given["entropy"], None),
    )
    return trainer


def vllm_ratio(trainer, given):
    """What the statements of _generate_and_score_completions from "per_token_logps_diff" on make of the columns."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    begin = source.index("                per_token_logps_diff = ")
    end = source.index("            # Compute the per-token log probabilities for the reference model")
    names = {
        "torch": torch,
        "math": math,
        "self": trainer,
        "old_per_token_logps": given["previous"],
        "sampling_per_token_logps": given["generation"],
        "mask": given["mask"],
    }
    exec(textwrap.dedent(source[begin:end]), names)
    return names["vllm_importance_sampling_ratio"]


def compute(name, options, given):
    """The loss, and its gradient [B, WIDTH] by the log-probabilities."""
    current = given["current"].clone().requires_grad_()
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
    }
    if name == "rloo":
        trainer = trainer_of(RLOOTrainer, options, given, current)
        inputs["old_logps"] = (given["previous"] * given["mask"]).sum(1)
    else:
        trainer = trainer_of(GRPOTrainer, options, given, current)
        inputs["old_per_token_logps"] = given["previous"]
        inputs["ref_per_token_logps"] = given["reference"]
        inputs["sampling_per_token_logps"] = given["generation"]
        inputs["num_items_in_batch"] = given["mask"].sum()
        if trainer.use_vllm:
            inputs["importance_sampling_ratio"] = vllm_ratio(trainer, given)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), current.grad


def packed(values):
    """One token of a prompt, with a value of 0, before the tokens of each completion, end to end."""
    return list(
        itertools.chain.from_iterable([0.0, *row[:length].tolist()] for row, length in zip(values, LENGTHS, strict=True))
    )


def main():
    """Write the numbers beside this file."""
    assert trl.__version__ == "1.16.0", trl.__version__
    given, rewards = columns(), reward_columns()
    cases = []
    for name, (options, own) in CASES.items():
        loss, gradient = compute(name, options, given)
        if quantile := options.get("top_entropy_quantile"):
            inside = given["entropy"][given["mask"].bool()].float()
            own = {**own, "entropy_minimum": torch.quantile(inside, 1 - quantile).item()}
        cases.append({"name": name, "options": {**TRAINER, **own}, "loss": loss, "gradient": packed(gradient)})
    document = {
        "made_with": f"trl {trl.__version__}",
        "lengths": LENGTHS,
        "advantages": given["advantages"].tolist(),
        **{name: packed(given[name]) for name in ("generation", "previous", "reference", "current", "entropy")},
        "num_generations": NUM_GENERATIONS,
        "rewards": dict(zip(REWARD_WEIGHTS, rewards.T.tolist(), strict=True)),
    }
    lists = {
        "advantage_cases": [
            {"name": name, "options": own, "advantages": advantages_of(name, options, rewards).tolist()}
            for name, (options, own) in ADVANTAGE_CASES.items()
        ],
        "cases": cases,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    for key, values in lists.items():
        numbers = ",\n".join(f"    {json.dumps(value)}" for value in values)
        lines.append(f"  {json.dumps(key)}: [\n{numbers}\n  ]")
    Path(__file__).with_name("trl_numbers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
