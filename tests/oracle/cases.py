"""The runs that the oracle judges: one recipe, and what varies in it."""

import tomllib
from collections.abc import Sequence
from typing import Literal

import pytest
from attrs import frozen

from .reference_grpo import Options

ALPHABET = "0123456789+="
PARTIAL_CREDIT = 0.5
MAX_LENGTH = 64
NUM_STEPS = 3
PROMPTS_PER_STEP = 6
SAMPLES_PER_PROMPT = 6

RECIPE = f"""
[run]
num_steps = {NUM_STEPS}
seed = 5
device = "cpu"
[model]
path = "{{model}}"
dtype = "float32"
[algorithm]
name = "grpo"
[algorithm.grpo]
clip_low = 0.2
clip_high = 0.3
importance_maximum = 0.84
advantage_epsilon = 0.01
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 99
num_train = 60
num_evaluation = 8
partial_credit = {PARTIAL_CREDIT}
[generator]
name = "transformers"
[rollout]
samples_per_prompt = {SAMPLES_PER_PROMPT}
max_prompt_tokens = 8
temperature = 0.8
[training]
prompts_per_step = {PROMPTS_PER_STEP}
max_token_mult_prob_error = 1e9
warn_token_mult_prob_error = 1e9
[optimizer]
learning_rate = 0.05
betas = [0.8, 0.95]
eps = 2e-2
weight_decay = 0.1
[schedule]
warmup_steps = 2
decay = "linear"
min_learning_rate_ratio = 0.1
[logging]
rollouts_every_n_steps = 1
[sinks]
names = []
[checkpoint]
at_end = false
export = "hf"
"""


SEPARATE = {"cluster.gpus_per_node": 2, "cluster.placement": "separate", "cluster.generator_gpus_per_node": 1}


@frozen(kw_only=True)
class Case:
    """One run."""

    trainer: Literal["fsdp2", "megatron"]
    updates: int
    previous: Literal["generation", "trainer"]
    kl: bool
    cut: bool
    """Whether sampling is cut by top-p."""
    masked: bool = False
    """Whether the trainer normalises over what it had kept, instead of over all tokens."""
    ranks: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    by_sequence: bool = False
    """Whether the loss is a mean over sequences instead of tokens."""
    epochs: int = 1
    """How often a step goes through its samples, in `updates` updates each time."""
    grows: bool = False
    """True where a group without a signal gets as many samples again."""
    reuse: int = 1
    """How many steps train on the samples of the first of them."""
    staleness: int = 0
    on_stale: Literal["wait", "rescore"] = "wait"
    generator: Literal["transformers", "vllm"] = "transformers"
    separate: bool = False
    """Whether the generator has a process of its own and works while the trainer does."""

    @property
    def name(self) -> str:
        parts = (
            self.trainer,
            f"{self.updates}-updates",
            self.previous,
            "kl" if self.kl else "no-kl",
            "top-p" if self.cut else "whole",
            *(["masked"] if self.masked else []),
            *(["two-ranks"] if self.ranks == 2 else []),
            *([self.dtype] if self.dtype != "float32" else []),
            *(["by-sequence"] if self.by_sequence else []),
            *([f"{self.epochs}-epochs"] if self.epochs > 1 else []),
            *(["grows"] if self.grows else []),
            *([f"used-{self.reuse}-times"] if self.reuse > 1 else []),
            *([f"{self.staleness}-behind", self.on_stale] if self.staleness else []),
            *([self.generator] if self.generator != "transformers" else []),
            *(["separate"] if self.separate else []),
        )
        return "-".join(parts)

    @property
    def max_microbatch_tokens(self) -> int:
        """Few enough for several microbatches."""
        return 3 * MAX_LENGTH // 2 if self.staleness else 28

    @property
    def overrides(self) -> list[str]:
        """Of the recipe."""
        values = {
            "run.name": self.name,
            "trainer.name": self.trainer,
            "model.dtype": self.dtype,
            "training.minibatches_per_step": self.updates,
            "training.epochs_per_step": self.epochs,
            "rollout.reuse": self.reuse,
            **({"rollout.max_samples_per_prompt": 2 * SAMPLES_PER_PROMPT} if self.grows else {}),
            "training.max_tokens_per_microbatch": self.max_microbatch_tokens,
            "rollout.max_response_tokens": 4,
            "algorithm.grpo.previous_logprobs": self.previous,
            "algorithm.grpo.kl_coefficient": self.options.kl_coefficient,
            "algorithm.grpo.loss_normalisation": self.options.loss_normalisation,
            "optimizer.max_grad_norm": self.options.max_grad_norm,
            **({"rollout.top_p": self.options.top_p} if self.cut else {}),
            **({"rollout.accept_truncation_bias": "true"} if self.cut and not self.masked else {}),
            **({"cluster.gpus_per_node": self.ranks} if self.ranks > 1 else {}),
            **(self._asynchrony if self.staleness else {}),
        }
        return [f"{key}={value}" for key, value in values.items()]

    @property
    def _asynchrony(self) -> dict[str, object]:
        """Long answers, few of which are under way at a time: weights change in the midst of some."""
        num_at_a_time = 6 if self.separate else 2 * SAMPLES_PER_PROMPT
        if self.on_stale == "rescore":  # some of them for more than two updates
            num_at_a_time = 2 * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
        places = {"transformers": "max_batch_size", "vllm": "max_num_seqs"}[self.generator]
        return {
            "async.max_staleness": self.staleness,
            "async.on_stale": self.on_stale,
            "generator.name": self.generator,
            f"generator.{self.generator}.{places}": num_at_a_time,
            "rollout.max_response_tokens": 40,
            **({"async.extra_prompts": 2 * PROMPTS_PER_STEP} if self.on_stale == "rescore" else {}),
            **({"generator.vllm.cpu_kv_cache_gib": 0.1} if self.generator == "vllm" else {}),
            **(SEPARATE if self.separate else {}),
            # An engine that is stopped for updates may be too quick, or too slow, for them to come in the midst of samples.
            **({"observers.names": '["patience"]'} if self.separate and self.generator == "transformers" else {}),
        }

    @property
    def options(self) -> Options:
        """For the reference: what the recipe and the case say."""
        recipe = tomllib.loads(RECIPE)
        grpo, optimizer, schedule = recipe["algorithm"]["grpo"], recipe["optimizer"], recipe["schedule"]
        return Options(
            seed=recipe["run"]["seed"],
            num_steps=NUM_STEPS,
            minibatches_per_step=self.updates,
            epochs_per_step=self.epochs,
            max_staleness=self.staleness,
            temperature=recipe["rollout"]["temperature"],
            top_p=0.8 if self.cut else 1.0,
            masked=self.masked,
            rescores=self.on_stale == "rescore",
            previous=self.previous,
            kl_coefficient=0.3 if self.kl else 0.0,
            loss_normalisation="sequence" if self.by_sequence else "token",
            # Binds in some updates, and not in others.
            max_grad_norm=1.5 if self.updates > 1 else 1.05,
            warmup_steps=schedule["warmup_steps"],
            min_learning_rate_ratio=schedule["min_learning_rate_ratio"],
            **{name: grpo[name] for name in ("clip_low", "clip_high", "importance_maximum", "advantage_epsilon")},
            **{name: optimizer[name] for name in ("learning_rate", "betas", "eps", "weight_decay")},
        )


def named(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """One test for each."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
