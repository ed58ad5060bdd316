"""The work of a recipe's step, as planners of trainers and generators get it."""

from attrs import field, frozen

from rlcore.config.model import Offload
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.selection import select
from rlcore.registry.states import entries_by_name
from rlcore.run.plan.choice import build_chosen_algorithm
from rlcore.spi import AlgorithmNeeds, ConfigError, DtypeName, PlanContext, Problem
from rlcore_plan.devices import Devices
from rlcore_plan.environment_memory import EnvironmentMemory, environment_memory
from rlcore_plan.step_work import RESPONSE_SHARE, step_context


@frozen(kw_only=True)
class Work:
    """A step's work on some devices; the contexts of the roles say on which of them."""

    context: PlanContext
    """With all devices, and all of their memory."""
    generates: bool
    offload: Offload
    """offload.trainer of the recipe."""
    max_staleness: int
    epochs: int = 1
    """Passes of a step's updates over its sequences."""
    reuse: int = 1
    """Steps that train on the sequences of one generation."""
    reaches_machines: bool = False
    """True where the recipe says how to reach several machines."""
    generator_sleep_mode: bool = True
    """offload.generator_sleep_mode of the recipe."""
    is_separate: bool = False
    """True where the recipe gives generators devices of their own."""
    reference_per_node: int = 0
    """Devices of each machine that hold the reference and nothing else."""
    beside: EnvironmentMemory = field(factory=EnvironmentMemory)
    """The memory of environments on the first device, which trains."""
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
    needs, rollout = _needs(recipe, registry), recipe.rollout
    apart = _reference_per_node(recipe, needs, devices)
    context = step_context(
        recipe,
        needs,
        _dtype(recipe),
        devices.spec,
        reference_is_apart=bool(apart),
        world_size=devices.number,
        local_size=devices.per_node,
        mean_prompt=_mean(mean_prompt, "--mean-prompt", rollout.max_prompt_tokens),
        mean_response=_mean(mean_response, "--mean-response", rollout.max_response_tokens),
    )
    assumptions = _assumptions(recipe, context, mean_prompt, mean_response)
    beside = environment_memory(recipe, _environments(recipe, registry), context)
    assumptions += beside.assumptions
    if beside.parts:
        assumptions.append(f"On the first device {beside.told} GiB; as much is left free on each that trains.")
    if apart:
        assumptions.append(
            f"The reference has {apart} device(s) of each machine to itself: its memory and time are not predicted, and the "
            "time is taken to pass while the others generate and train."
        )
    return Work(
        context=context,
        generates=needs.source == "rollouts",
        offload=recipe.offload.trainer,
        max_staleness=recipe.async_.max_staleness,
        epochs=recipe.training.epochs_per_step,
        reuse=rollout.reuse,
        reaches_machines=recipe.cluster is not None and recipe.cluster.reaches_machines,
        generator_sleep_mode=recipe.offload.generator_sleep_mode,
        is_separate=recipe.cluster is not None and recipe.cluster.placement == "separate",
        reference_per_node=apart,
        beside=beside,
        assumptions=tuple(assumptions),
    )


def _environments(recipe: Recipe, registry: Registry) -> list[Entry]:
    """Return all environments that the recipe names; whether they would run on this machine does not matter. PluginError where
    one is unknown."""
    if recipe.environment is None:
        return []
    known = entries_by_name(registry.of("environment"))
    names = dict.fromkeys((recipe.environment.name, *recipe.data.environment_of_set.values()))
    return [known.get(name) or select(registry, "environment", name, device="cuda", needs={}) for name in names]


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


def _mean(given: float | None, option: str, limit: int) -> float | None:
    if given is not None and not 0 < given <= limit:
        raise ConfigError(
            [Problem(path=option, found=f"{given:g}", expected=f"above 0 and at most {limit}, the recipe's limit")]
        )
    return given


def _assumptions(
    recipe: Recipe,
    context: PlanContext,
    given_prompt: float | None,
    given_response: float | None,
) -> list[str]:
    def source(given: float | None, option: str, limit: int) -> str:
        return option if given is not None else f"half of the recipe's limit of {limit:,}; {option} says otherwise"

    rollout, prompt = recipe.rollout, context.prompt_tokens
    response = RESPONSE_SHARE * rollout.max_response_tokens if given_response is None else given_response
    found = [
        f"Prompts have {prompt:,.0f} tokens on average ({source(given_prompt, '--mean-prompt', rollout.max_prompt_tokens)}).",
        f"Answers have {response:,.0f} tokens on average "
        f"({source(given_response, '--mean-response', rollout.max_response_tokens)}), log-normal and cut at the limit.",
        f"A step has {context.num_sequences:,} sequences and {recipe.training.updates_per_step} update(s), in {context.dtype}.",
        "It is a warm step: no checkpoint, no evaluation, environments and tools that take no time of their own.",
    ]
    if recipe.async_.max_staleness:
        found.append(
            f"Generation runs {recipe.async_.max_staleness} step(s) ahead: a step waits for the groups that began so many "
            'before it, and unfinished samples go on in the next, as with on_stale = "wait" and partial_rollouts = "continue".'
        )
    if recipe.rollout.dynamic_sampling:
        found.append("No group is replaced for equal rewards.")
    if rollout.reuse > 1:
        found.append(f"A step takes 1/{rollout.reuse} of a generation, which {rollout.reuse} steps train on.")
    if rollout.max_samples_per_prompt is not None:
        found.append(f"Each prompt gets {rollout.samples_per_prompt} samples, of at most {rollout.max_samples_per_prompt}.")
    return found
