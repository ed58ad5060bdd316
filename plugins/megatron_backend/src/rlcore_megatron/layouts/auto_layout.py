"""Chooses the parallel sizes that are "auto": the cheapest that divide model and ranks and fit on the devices."""

from collections.abc import Iterator
from itertools import product

from attrs import evolve, frozen

from rlcore.spi import ConfigError, Problem
from rlcore_megatron.layouts.layout_check import AUTO_SIZES, SECTION, layout_problems, reference_layout_problems
from rlcore_megatron.layouts.memory import Estimate, Workload, estimate
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.distributed.format_bytes import gib


@frozen(kw_only=True)
class Choice:
    """A section with numbers for all of its sizes."""

    config: MegatronConfig
    reason: str
    """The reason for these sizes, in a sentence; empty where nothing was to be chosen."""


@frozen(kw_only=True)
class _Candidate:
    config: MegatronConfig
    estimate: Estimate | None
    """None for a model whose config.json lacks sizes."""
    shares_heads: bool
    """True where several tensor ranks share a key head: they then gather all queries, keys and values in every layer."""

    @property
    def cost(self) -> tuple[int, ...]:
        """Least ranks that data is not divided among; then, for the same number of them, what talks least and idles least:
        experts' ranks are data ranks too, tensor ranks share a machine, context ranks exchange keys or heads in each layer,
        tensor ranks beyond the key heads gather more than those, and stages wait for each other."""
        sizes = self.config
        pipeline, context, tensor = map(int, (sizes.pipeline_parallel, sizes.context_parallel, sizes.tensor_parallel))
        return pipeline * context * tensor, pipeline, self.shares_heads, context, tensor, int(sizes.expert_parallel)


def choose(config: MegatronConfig, load: Workload) -> Choice:
    """Numbers in place of every "auto"; sizes that are numbers already stay. On a CPU they are 1.

    More memory never gives more ranks that data is not divided among. ConfigError where no sizes divide, or none fit.
    """
    chosen = tuple(name for name in AUTO_SIZES if getattr(config, name) == "auto")
    if not chosen:
        return Choice(config=config, reason="")
    if load.device == "cpu":
        return Choice(config=evolve(config, **dict.fromkeys(chosen, 1)), reason="")
    candidates = sorted(_candidates(config, load, chosen), key=lambda candidate: candidate.cost)
    if not candidates:
        raise ConfigError([_undividable(config, load)])
    usable = load.usable_bytes
    if usable is None or candidates[0].estimate is None:
        sentence = f"{_named(candidates[0].config, chosen)}: the smallest sizes that divide; whether it fits is not known"
        return Choice(config=candidates[0].config, reason=sentence)
    fitting = next((candidate for candidate in candidates if _total(candidate) <= usable), None)
    if fitting is None:
        raise ConfigError([_too_large(min(candidates, key=_total), chosen, load, usable)])
    return Choice(config=fitting.config, reason=_reason(fitting, candidates[0], chosen, load))


def _candidates(config: MegatronConfig, load: Workload, chosen: tuple[str, ...]) -> Iterator[_Candidate]:
    """Every choice that `check` would find nothing wrong with."""
    dims = ModelDims.of(load.model)
    for sizes in candidate_sizes(chosen, load, dims):
        resolved = evolve(config, **dict(zip(chosen, sizes, strict=True)))
        fits = not layout_problems(resolved, load.world_size, load.device, load.model, load.family)
        if fits and not reference_layout_problems(
            resolved, load.world_size, load.device, load.reference, load.reference_family
        ):
            shares_heads = dims is not None and int(resolved.tensor_parallel) > dims.num_kv_heads
            found = None if dims is None else estimate(dims, resolved, load)
            yield _Candidate(config=resolved, estimate=found, shares_heads=shares_heads)


def candidate_sizes(chosen: tuple[str, ...], load: Workload, dims: ModelDims | None) -> Iterator[tuple[int, ...]]:
    """Divisors of the ranks in place of each of these; whether they divide the model is not looked at yet."""
    # What may be divided: tensor ranks share a machine, and only experts are divided among experts' ranks.
    wholes = {
        "tensor_parallel": min(load.local_size, load.world_size),
        "expert_parallel": (dims.num_experts if dims else 0) or 1,
    }
    divisors = [size for size in range(1, load.world_size + 1) if load.world_size % size == 0]
    return product(*([size for size in divisors if wholes.get(name, size) % size == 0] for name in chosen))


def _total(candidate: _Candidate) -> int:
    return candidate.estimate.total if candidate.estimate else 0


def _reason(fitting: _Candidate, smallest: _Candidate, chosen: tuple[str, ...], load: Workload) -> str:
    instead = "" if fitting is smallest else f" instead of {gib(_total(smallest))}"
    name = _named(fitting.config, chosen)
    return f"{name}: {gib(_total(fitting))} a GPU{instead}, of {gib(load.memory_bytes or 0)} ({fitting.estimate})"


def _named(config: MegatronConfig, chosen: tuple[str, ...]) -> str:
    above = [f"{name} {getattr(config, name)}" for name in chosen if getattr(config, name) > 1]
    return ", ".join(above) or f"{' = '.join(chosen)} = 1"


def _undividable(config: MegatronConfig, load: Workload) -> Problem:
    fixed = [f"{name} {getattr(config, name)}" for name in AUTO_SIZES if getattr(config, name) != "auto"]
    fixed += [f"virtual_pipeline_parallel {config.virtual_pipeline_parallel}"]
    return Problem(
        path=SECTION,
        found=f'{", ".join(fixed)} on {load.world_size} rank(s), which no sizes in place of "auto" go with',
        expected="sizes that divide ranks, heads, experts and vocabulary, and no more stages than layers",
        remedy="Change these, or give the trainer another number of ranks",
    )


def _too_large(best: _Candidate, chosen: tuple[str, ...], load: Workload, usable: int) -> Problem:
    return Problem(
        path=SECTION,
        found=f"{gib(_total(best))} a GPU in the layout that needs least, {_named(best.config, chosen)} ({best.estimate})",
        expected=f"at most {gib(usable)}, which can be planned with of {gib(load.memory_bytes or 0)}",
        remedy=f"{_remedy(best.config, load, usable)}. Sizes that are set to numbers are taken without this estimate",
    )


def _remedy(config: MegatronConfig, load: Workload, usable: int) -> str:
    """The key that would make the layout that needs least fit, where one alone can."""
    dims = ModelDims.of(load.model)
    assert dims is not None
    if estimate(dims, evolve(config, recompute="full"), load).total <= usable:
        return f'Set {SECTION}.recompute to "full"'
    if estimate(dims, config, evolve(load, max_microbatch_tokens=None)).total <= usable:
        return "Lower training.max_tokens_per_microbatch"
    if estimate(dims, config, evolve(load, max_microbatch_tokens=None, max_sequence_length=1)).total <= usable:
        return "Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or give the trainer more GPUs"
    return "Give the trainer more GPUs"
