"""What a recipe asks of a step, as trainers and generators are told it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, frozen

from rlcore.config.model import ModelConfig
from rlcore.config.recipe import Recipe
from rlcore.model_files import CONFIG_FILE, is_hub_name, read_object
from rlcore.planner.devices import Devices
from rlcore.planner.lengths import response_lengths
from rlcore.registry.discovery import Registry
from rlcore.registry.selection import select
from rlcore.run.plan.choice import build_chosen_algorithm
from rlcore.spi import CHANNELS, AlgorithmNeeds, ConfigError, DtypeName, ModelError, PlanContext, Problem

PROMPT_SHARE, RESPONSE_SHARE = 0.5, 0.5
"""Shares of the longest prompt and answer that are their means, where the mean is not told."""


@frozen(kw_only=True)
class Work:
    """A step's work on some devices; the contexts of the roles say on which of them."""

    context: PlanContext
    """With all devices, and all of their memory."""
    generates: bool
    offload: str
    """residency.offload_trainer of the recipe."""
    max_staleness: int
    has_address: bool = False
    """Whether the recipe says where Ray runs, as several machines need."""
    is_separate: bool = False
    """Whether the recipe gives generators devices of their own."""
    reference_per_node: int = 0
    """Devices of each machine that hold the reference and nothing else."""
    assumptions: tuple[str, ...]


def work_of(
    recipe: Recipe,
    registry: Registry,
    devices: Devices,
    *,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
) -> Work:
    """The work of a recipe's step. ConfigError or ModelError where it cannot be told."""
    needs = _needs(recipe, registry)
    rollout, training = recipe.rollout, recipe.training
    model = model_content(recipe.model)
    prompt = _mean(mean_prompt, "--mean-prompt", rollout.max_prompt_tokens, PROMPT_SHARE)
    response = _mean(mean_response, "--mean-response", rollout.max_response_tokens, RESPONSE_SHARE)
    generates = needs.source == "rollouts"
    apart = _reference_per_node(recipe, needs, devices)
    samples = rollout.samples_per_prompt if generates else 2 if needs.source == "preferences" else 1
    updates = training.updates_per_step
    reference = None
    if needs.reference_logprobs and not apart:
        named = recipe.reference
        reference = model if named is None else model_content(ModelConfig(path=named.path, revision=named.revision))
    context = PlanContext(
        model=model,
        dtype=_dtype(recipe),
        device=devices.spec,
        world_size=devices.number,
        local_size=devices.per_node,
        is_shared=True,
        free_bytes=devices.spec.memory_bytes,
        num_sequences=training.prompts_per_step * samples,
        prompt_tokens=prompt,
        samples_per_prompt=samples,
        response_lengths=response_lengths(response, rollout.max_response_tokens),
        max_sequence_length=rollout.max_sequence_length,
        max_microbatch_tokens=training.max_tokens_per_microbatch,
        updates=updates,
        policy_passes=(updates - 1) / updates if needs.previous_logprobs else 0.0,
        reference_passes=1.0 if needs.reference_logprobs and generates and not apart else 0.0,
        reference=reference,
        lora=recipe.lora,
        delta_copies=_delta_copies(recipe) if generates else "none",
    )
    assumptions = _assumptions(recipe, context, mean_prompt, mean_response, prompt, response)
    if apart:
        assumptions.append(
            f"The reference has {apart} device(s) of each machine to itself: its memory and time are not predicted, and the "
            "time is taken to pass while the others generate and train."
        )
    return Work(
        context=context,
        generates=generates,
        offload=recipe.residency.offload_trainer,
        max_staleness=recipe.async_.max_staleness,
        has_address=recipe.cluster is not None and recipe.cluster.address is not None,
        is_separate=recipe.cluster is not None and recipe.cluster.placement == "separate",
        reference_per_node=apart,
        assumptions=tuple(assumptions),
    )


def _delta_copies(recipe: Recipe) -> Literal["none", "parts", "whole"]:
    """Where generators have devices of their own."""
    if recipe.refit.delta != "device":
        return "none"
    named = CHANNELS.get(recipe.refit.channel)
    return "whole" if named is not None and not named.sharded else "parts"


def _reference_per_node(recipe: Recipe, needs: AlgorithmNeeds, devices: Devices) -> int:
    """Devices of each machine that the reference has to itself. ConfigError where it leaves none."""
    apart = recipe.cluster.reference_gpus_per_node if recipe.cluster is not None and needs.reference_logprobs else 0
    if apart >= devices.per_node:
        raise ConfigError(
            [
                Problem(
                    path="cluster.reference_gpus_per_node",
                    found=f"{apart}, with --gpus of {devices}",
                    expected=f"fewer than the {devices.per_node} of a machine: the others train and generate",
                    remedy="Plan with more devices, or with cluster.reference_gpus_per_node=0.",
                )
            ]
        )
    return apart


def _needs(recipe: Recipe, registry: Registry) -> AlgorithmNeeds:
    entry = select(registry, "algorithm", recipe.algorithm.name, device="cuda", needs={})
    return build_chosen_algorithm(recipe, entry, _dtype(recipe)).needs


def _dtype(recipe: Recipe) -> DtypeName:
    return "bfloat16" if recipe.model.dtype == "auto" else recipe.model.dtype


def _mean(given: float | None, option: str, limit: int, share: float) -> float:
    if given is not None and not 0 < given <= limit:
        raise ConfigError(
            [Problem(path=option, found=f"{given:g}", expected=f"above 0 and at most {limit}, the recipe's limit")]
        )
    return share * limit if given is None else given


def _assumptions(
    recipe: Recipe,
    context: PlanContext,
    given_prompt: float | None,
    given_response: float | None,
    prompt: float,
    response: float,
) -> list[str]:
    def source(given: float | None, option: str, limit: int) -> str:
        return option if given is not None else f"half of the recipe's limit of {limit:,}; {option} says otherwise"

    rollout = recipe.rollout
    found = [
        f"Prompts have {prompt:,.0f} tokens on average ({source(given_prompt, '--mean-prompt', rollout.max_prompt_tokens)}).",
        f"Answers have {response:,.0f} tokens on average "
        f"({source(given_response, '--mean-response', rollout.max_response_tokens)}), log-normal and cut at the limit.",
        f"A step has {context.num_sequences:,} sequences and {context.updates} update(s), in {context.dtype}.",
        "It is a warm step: no checkpoint, no evaluation, environments and tools that take no time of their own.",
    ]
    if recipe.rollout.refill_equal_rewards:
        found.append("No group is replaced for equal rewards.")
    return found


def model_content(model: ModelConfig) -> Mapping[str, Any]:
    """The content of a model's config.json, from a local directory or from the Hub. ModelError where there is none."""
    directory = Path(model.path).expanduser()
    is_remote = not directory.exists() and is_hub_name(model.path)
    content = read_object(_from_hub(model) if is_remote else directory / CONFIG_FILE)
    if isinstance(content, Problem):
        raise ModelError([content])
    return content


def _from_hub(model: ModelConfig) -> Path:
    from rlcore.run.data.tokenizer import model_file

    found = model_file(model, CONFIG_FILE)
    if found is None:
        expected = f"a local directory with {CONFIG_FILE}, or a name on the Hub, which has to be in reach"
        raise ModelError(
            [Problem(path="model.path", found=f"{model.path}, of which no {CONFIG_FILE} was found", expected=expected)]
        )
    return found


def on_part(context: PlanContext, devices: Devices, per_node: int, free_bytes: float, *, is_shared: bool) -> PlanContext:
    """The context of a role that has so many devices of each machine, and so many bytes of each."""
    copies = context.delta_copies
    return evolve(
        context,
        world_size=devices.nodes * per_node,
        local_size=per_node,
        is_shared=is_shared,
        free_bytes=int(free_bytes),
        # Parts travel between devices; to a generator on the trainer's own whole tensors do.
        delta_copies="whole" if is_shared and copies == "parts" else copies,
    )
