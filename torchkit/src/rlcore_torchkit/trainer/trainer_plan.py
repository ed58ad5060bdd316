"""The `plan` of a trainer written with torchkit: the model's sizes, and the seconds of each phase."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore.spi import ModelError, PlanContext, Problem
from rlcore.spi.weights import ITEM_BYTES
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import NO_FAMILIES, Families, find_architecture
from rlcore_torchkit.architectures.values import value_problems
from rlcore_torchkit.trainer.step_costs import Layout, Tokens, num_parameters, pass_seconds, update_seconds

CONFIG = "config.json"
NARROW_BYTES = 42
"""Bytes of the memory's traffic in whose time an update of moments in 8 bits, state and weights left out, searches for codes:
0.180 s for 8.03 billion parameters on an H200, where the state's own traffic takes 0.04."""
HOST_ADAM_BYTES = 28
"""Bytes that an update on the host reads and writes for a parameter: master and moments both ways, and the gradient, in
float32."""
HOST_ADAM_RATE = 34e9
"""Bytes/s of such an update: with it on the host, a step of 1.5 billion parameters took 1.41 s longer on one H100."""
EXPERT_KEYS = ("n_routed_experts", "num_local_experts")
"""Other families' names of `num_experts`."""


@frozen(kw_only=True)
class PlannedModel:
    """A model that is known by its config.json alone."""

    dims: ModelDims
    config: Mapping[str, Any]
    """Its content under the keys that most families use."""


def planned_model(config: Mapping[str, Any], families: Families = NO_FAMILIES) -> PlannedModel:
    """Return the sizes in a config.json; an unknown family is read by Llama's keys. ModelError where they lack the sizes."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        found, expected = f"text_config = {text!r}", "an object with the decoder's sizes, such as hidden_size"
        raise ModelError([Problem(path=CONFIG, found=found, expected=expected)])
    config = {**config, **text}
    family = find_architecture(config, CONFIG, families)
    standard = _with_experts(config) if isinstance(family, Problem) else family.standard(config)
    problems = [*value_problems(standard)]
    dims = None if problems else ModelDims.of(standard)
    if dims is None:
        found = "; ".join(f"{one.path} = {one.found}" for one in problems) or f"the keys {', '.join(sorted(standard))}"
        expected = "sizes under the keys of Llama's or a known family's, such as hidden_size and num_hidden_layers"
        raise ModelError([Problem(path=CONFIG, found=found, expected=expected)])
    return PlannedModel(dims=dims, config=standard)


def _with_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a family that nothing describes, with its experts under Qwen's keys, as Mixtral's."""
    found = dict(config)
    number = next((config[key] for key in EXPERT_KEYS if config.get(key)), config.get("num_experts"))
    if not number:
        return found
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    found |= {"num_experts": number, "moe_intermediate_size": width}
    found.setdefault("mlp_only_layers", list(range(config.get("first_k_dense_replace") or 0)))
    found.setdefault("shared_expert_intermediate_size", (config.get("n_shared_experts") or 0) * (width or 0))
    return found


def sent_copies(context: PlanContext, dims: ModelDims) -> dict[str, int]:
    """Return the bytes of sent weights that a rank keeps: all ranks together keep each value once. Empty where nothing is
    kept."""
    if context.delta_copies != "parts":
        return {}
    return {"copies of sent weights": int(ITEM_BYTES[context.dtype] * num_parameters(dims) / context.world_size)}


def tokens_of(context: PlanContext, share: float = 1.0) -> Tokens:
    """The tokens of a share of a step's sequences."""
    lengths = [context.prompt_tokens + length for length in context.response_lengths]
    number = context.num_sequences * share
    return Tokens(
        number=number * sum(lengths) / len(lengths),
        squared=number * sum(length**2 for length in lengths) / len(lengths),
        longest=min(context.max_sequence_length, max(lengths)),
        per_microbatch=context.max_microbatch_tokens,
    )


def trainer_seconds(
    context: PlanContext,
    dims: ModelDims,
    layout: Layout,
    *,
    recomputes: bool,
    state_bytes: float,
    reference: ModelDims | None = None,
    num_trained: float | None = None,
) -> dict[str, float]:
    """Seconds of a step's log-probabilities and updates. `state_bytes`: what of a rank's own state an update reads and writes;
    `num_trained`: the parameters that train, where these are not all."""
    whole, update = tokens_of(context), tokens_of(context, 1 / context.updates)
    trained = num_parameters(dims) if num_trained is None else num_trained
    training = pass_seconds(dims, context.device, update, layout, trains=True, recomputes=recomputes)
    narrow = NARROW_BYTES * trained / context.world_size if context.optimizer.moments == "8bit" else 0
    training += update_seconds(context.device, layout, trained, state_bytes + narrow)
    own = pass_seconds(dims, context.device, whole, layout, trains=False) * context.policy_passes
    other = pass_seconds(reference or dims, context.device, whole, layout, trains=False) * context.reference_passes
    return {"log-probabilities": own + other, "training": context.updates * training}


def host_update_seconds(context: PlanContext, num_parameters: float, sent_bytes: float) -> float:
    """Seconds of one update of so many parameters whose masters and moments are on the host; `sent_bytes` of each travel."""
    return num_parameters * (sent_bytes / context.device.host + HOST_ADAM_BYTES / HOST_ADAM_RATE)


def crossing(sizes: Mapping[str, tuple[int, int]], local_size: int) -> frozenset[str]:
    """The dimensions whose ranks lie on several machines; `sizes` holds for each its size, and the ranks from one to the next
    in it."""
    return frozenset(name for name, (size, stride) in sizes.items() if size > 1 and size * stride > local_size)
