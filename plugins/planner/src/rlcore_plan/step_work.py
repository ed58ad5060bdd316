"""A step's work as a recipe asks for it, as the `plan` of trainers and generators is told it: nothing here measures a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import evolve

from rlcore.config.model import ModelConfig
from rlcore.config.recipe import Recipe
from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi import AlgorithmNeeds, DeviceSpec, DtypeName, ModelError, PlanContext, Problem, installed_channels
from rlcore_model_files.directory import is_hub_name
from rlcore_plan.lengths import response_lengths
from rlcore_text.tokenizers.tokenizer import model_file

PROMPT_SHARE, RESPONSE_SHARE = 0.5, 0.5
"""Shares of the longest prompt and answer that are their means, where the mean is not told."""


def step_context(
    recipe: Recipe,
    needs: AlgorithmNeeds,
    dtype: DtypeName,
    device: DeviceSpec,
    *,
    reference_is_apart: bool,
    world_size: int,
    local_size: int,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
) -> PlanContext:
    """The work of a recipe's step, with all of these devices and all of their memory. Mean lengths, in tokens, are half of the
    recipe's limits where they are not told. ModelError where there is no config.json."""
    rollout, training = recipe.rollout, recipe.training
    model = model_content(recipe.model)
    generates = needs.source == "rollouts"
    samples = rollout.samples_per_prompt if generates else 2 if needs.source == "preferences" else 1
    updates, epochs = training.minibatches_per_step, training.epochs_per_step
    reference = None
    if needs.reference_logprobs and not reference_is_apart:
        named = recipe.reference
        reference = model if named is None else model_content(ModelConfig(path=named.path, revision=named.revision))
    response = RESPONSE_SHARE * rollout.max_response_tokens if mean_response is None else mean_response
    return PlanContext(
        model=model,
        dtype=dtype,
        device=device,
        world_size=world_size,
        local_size=local_size,
        is_shared=True,
        free_bytes=device.memory_bytes,
        num_sequences=training.prompts_per_step * samples,
        prompt_tokens=PROMPT_SHARE * rollout.max_prompt_tokens if mean_prompt is None else mean_prompt,
        samples_per_prompt=samples,
        response_lengths=response_lengths(response, rollout.max_response_tokens),
        max_sequence_length=rollout.max_sequence_length,
        max_microbatch_tokens=training.max_tokens_per_microbatch,
        updates=updates,
        policy_passes=(1.0 if epochs > 1 else (updates - 1) / updates) if needs.previous_logprobs else 0.0,
        reference_passes=1.0 if needs.reference_logprobs and generates and not reference_is_apart else 0.0,
        reference=reference,
        lora=recipe.lora,
        optimizer=recipe.optimizer,
        delta_copies=_delta_copies(recipe) if generates else "none",
    )


def on_part(context: PlanContext, nodes: int, per_node: int, free_bytes: float, *, is_shared: bool) -> PlanContext:
    """The context of a role that has so many devices of each machine, and so many bytes of each."""
    copies = context.delta_copies
    return evolve(
        context,
        world_size=nodes * per_node,
        local_size=per_node,
        is_shared=is_shared,
        free_bytes=int(free_bytes),
        # Parts travel between devices; to a generator on the trainer's own whole tensors do.
        delta_copies="whole" if is_shared and copies == "parts" else copies,
    )


def _delta_copies(recipe: Recipe) -> Literal["none", "parts", "whole"]:
    """The context of generators with their own devices."""
    if recipe.refit.delta != "device":
        return "none"
    named = installed_channels().get(recipe.refit.channel)
    return "whole" if named is not None and not named.sharded else "parts"


def model_content(model: ModelConfig) -> Mapping[str, Any]:
    """The content of a model's config.json, from a local directory or from the Hub. ModelError where there is none."""
    directory = expanded(model.path)
    is_remote = not directory.exists() and is_hub_name(model.path)
    content = read_object(_from_hub(model) if is_remote else directory / CONFIG_FILE)
    if isinstance(content, Problem):
        raise ModelError([content])
    return content


def _from_hub(model: ModelConfig) -> Path:
    found = model_file(model, CONFIG_FILE)
    if found is None:
        expected = f"a local directory with {CONFIG_FILE}, or a name on the Hub, which has to be in reach"
        raise ModelError(
            [Problem(path="model.path", found=f"{model.path}, of which no {CONFIG_FILE} was found", expected=expected)]
        )
    return found
