"""The engines that a step could be generated with, their memory and seconds: for `rlcore plan`; imports neither torch nor vLLM.

Samples of an engine decode together. A step of the engine reads the weights and each sequence's keys and values; as answers
end, steps become quicker, and there are as many of them as the longest answer has tokens. Where generation runs ahead they are
shared out among the turns of several steps, and samples of as many steps decode together.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul

from attrs import frozen

from rlcore.spi import PlanContext, PlanOption
from rlcore.spi.weights import ITEM_BYTES
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.trainer.step_costs import (
    PRODUCTS,
    active_parameters,
    attention_flops,
    layer_parameters,
    num_parameters,
    refit_seconds,
)
from rlcore_torchkit.trainer.trainer_plan import planned_model
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.memory import LARGEST_SHARE, model_size, recorder_bytes
from rlcore_vllm.setup.settings import engines_per_device

WEIGHTS = 0.84
"""Share of the bandwidth in reading weights for few sequences: 4.0 ms of products for 16 GB at 4.8 TB/s."""
KEYS = 0.6
"""Share of the bandwidth in reading keys and values."""
LAYER_S = 50e-6
"""Seconds of a layer and step beside its weights: kernels that are over at once, and the device's waiting for the host."""
REDUCE_S = 20e-6
"""Seconds of each of a layer's two sums over an engine's ranks."""
SEQUENCE_S, SHARED_SEQUENCE_S = 11e-6, 15e-6
"""Seconds of the host for a sequence and step: with one rank, half of which are hidden behind the device's work, and with
several, none of which are. The latter is of 30B-A3B on four GPUs, whose log-probabilities come to the host, as those of most
models of experts do in vLLM 0.26; engines of several devices that keep them there have not been measured."""
HIDDEN = 0.5
GRAPHS_BYTES = 2 * 2**30
"""Bytes of an engine's CUDA graphs and context."""
CONTEXT_BYTES = 9 * 2**26
"""Bytes of the CUDA context that another rank of an engine has on a device, whose trainer's weights it maps: 520 to 560 MiB."""
ASLEEP_BYTES = 5 * 2**29
"""Bytes that a rank of a sleeping engine leaves on its device: between 1.4 and 3.0 GiB."""


@frozen(kw_only=True)
class Engine:
    """The memory and traffic of one rank of an engine."""

    dims: ModelDims
    ranks: int
    item: float
    """Bytes of a weight of the layers."""
    weights: float
    kv_per_token: float

    @classmethod
    def of(cls, dims: ModelDims, dtype: str, ranks: int, config: VllmConfig) -> "Engine":
        """The engine of a model on so many ranks."""
        eight_bits = config.quantization != "none"
        size = model_size(dims, dtype, tensor_parallel=ranks, fp8=eight_bits, fp8_cache=config.kv_cache_dtype == "fp8")
        item = 1 if eight_bits else ITEM_BYTES[dtype]
        return cls(dims=dims, ranks=ranks, item=item, weights=size.weights, kv_per_token=size.kv_per_token)

    def read_bytes(self, num_sequences: float) -> float:
        """The weights that a step of so many sequences reads: of experts, those that any token goes to."""
        plain, experts = layer_parameters(self.dims)
        head = self.dims.vocab_size * self.dims.hidden_size
        if self.dims.num_experts:
            missed = (1 - self.dims.num_experts_per_token / self.dims.num_experts) ** num_sequences
            experts *= 1 - missed
        return ((plain + experts) * self.item + head * ITEM_BYTES["bfloat16"]) / self.ranks


def plan(context: PlanContext, config: VllmConfig) -> Sequence[PlanOption]:
    """Return an engine of each size that divides the model and a machine's devices, or the section's own where that is asked
    for."""
    dims = planned_model(context.model).dims
    if context.as_configured:
        return [_option(context, dims, config, config.tensor_parallel)]
    return [_option(context, dims, config, ranks) for ranks in _sizes(context, dims, config)]


def _sizes(context: PlanContext, dims: ModelDims, config: VllmConfig) -> Iterator[int]:
    for ranks in (config.tensor_parallel,) if config.tensor_parallel > 1 else (1, 2, 4, 8, 16):
        keys = dims.num_kv_heads
        if context.local_size % ranks == 0 and dims.num_heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0):
            yield ranks


def _option(context: PlanContext, dims: ModelDims, config: VllmConfig, ranks: int) -> PlanOption:
    engine = Engine.of(dims, context.dtype, ranks, config)
    memory, copies = _memory(context, engine, config), refit_copies(context, dims, config)
    contexts = context_bytes(context, ranks)
    beside = copies + contexts
    # Bytes are whole numbers: a share of them is a little less than the one that it was made by.
    share = min(LARGEST_SHARE, int(100 * (context.free_bytes - beside) / context.device.memory_bytes + 1e-6) / 100)
    options: dict[str, bool | int | float | str] = {"tensor_parallel": ranks, "gpu_memory_utilization": max(share, 0.01)}
    if not context.is_shared and not context.as_configured:
        options["replicas"] = context.local_size // ranks
    return PlanOption(
        options={name: value for name, value in options.items() if value != getattr(config, name)},
        num_devices=ranks,
        memory=memory,
        idle={"none": ASLEEP_BYTES + copies + contexts},
        seconds={
            "generation": generation_seconds(context, engine, config, memory["KV cache"]),
            "refit": refit_seconds(
                dims,
                context.device,
                travels=not context.is_shared or context.world_size > 1,
                crosses_nodes=not context.is_shared and context.world_size > context.local_size,
            ),
        },
        assumptions=_assumptions(context),
    )


def _assumptions(context: PlanContext) -> tuple[str, ...]:
    shares = "vllm: engines get equal shares of the samples, with lengths drawn alike; a prompt's samples share its cache."
    if not context.generation_turns:
        return (shares,)
    ahead = (
        f"vllm: samples of {len(context.generation_turns)} steps are generated beside each other; the seconds are a mean over "
        "steps whose turns differ, and behind each refit an engine reads anew what is unfinished."
    )
    return shares, ahead


def _memory(context: PlanContext, engine: Engine, config: VllmConfig) -> dict[str, int]:
    """Bytes of one rank; the KV cache is what the rest leaves, and at least the longest sequence."""
    dims = engine.dims
    sequences = min(config.max_num_seqs, context.num_sequences)
    width = 4 * dims.hidden_size + 3 * max(dims.intermediate_size, dims.moe_intermediate_size) / engine.ranks
    step = config.max_num_batched_tokens * width * ITEM_BYTES[context.dtype] + 4 * sequences * dims.vocab_size
    reserve = GRAPHS_BYTES + step + recorder_bytes(config.max_num_seqs, context.max_sequence_length)
    reserve += context_bytes(context, engine.ranks)
    least, copies = engine.kv_per_token * context.max_sequence_length, refit_copies(context, dims, config)
    cache = max(least, context.free_bytes - copies - engine.weights - reserve)
    parts = {"engine's weights": int(engine.weights), "KV cache": int(cache), "engine's reserve": int(reserve)}
    return parts | ({"engine's copies of weights": copies} if copies else {})


def context_bytes(context: PlanContext, ranks: int) -> int:
    """Return the bytes of the CUDA contexts of an engine's other ranks on a device that they share with a trainer."""
    return (ranks - 1) * CONTEXT_BYTES if context.is_shared else 0


def refit_copies(context: PlanContext, dims: ModelDims, config: VllmConfig) -> int:
    """Bytes of the copies to which the changes of the next refit are relative, on the fullest device of an engine: each rank's,
    of all tensors, and those of the process that hosts the generator, which are on one of its devices. They are no part of
    what vLLM is given."""
    if context.delta_copies == "none":
        return 0
    copies = _engines_of_a_device(context, config) + (1 if context.delta_copies == "whole" else 0)
    return int(copies * num_parameters(dims) * ITEM_BYTES[context.dtype])


def _engines_of_a_device(context: PlanContext, config: VllmConfig) -> int:
    """Engines that share a device: one, unless the section of a run has several."""
    if not context.as_configured:
        return 1
    if config.devices is not None:
        return engines_per_device(config)
    num_devices = config.tensor_parallel if context.is_shared else context.local_size
    return -(-config.replicas * config.tensor_parallel // num_devices)


def generation_seconds(context: PlanContext, engine: Engine, config: VllmConfig, cache_bytes: float) -> float:
    """Seconds of a step's generation, until the samples that it waits for have ended; the mean, where steps differ."""
    lengths = context.response_lengths
    mean = context.prompt_tokens + sum(lengths) / len(lengths)
    most = max(1.0, min(config.max_num_seqs, cache_bytes / (engine.kv_per_token * mean)))
    turns = context.generation_turns or (lengths[-1],)
    total = 0.0
    for number, turn in enumerate(turns):
        if turn <= 0:
            continue  # all that the step waits for had ended before
        # The tokens of what began with this step, which are none, with the one before it, and so on.
        ages = list(accumulate([*turns[:number][::-1], *turns[:number:-1]], initial=0.0))
        total += kept_seconds(context, engine, most, ages) + turn_seconds(context, engine, most, ages, turn)
    return prefill_seconds(context, engine, _num_of_engine(context, engine)) + total / len(turns)


def kept_seconds(context: PlanContext, engine: Engine, most: float, ages: Sequence[float]) -> float:
    """Return the seconds in which an engine reads anew what had not ended at the refit; `ages` are the tokens of samples so
    far."""
    of_engine = _num_of_engine(context, engine)
    kept = [(_num_alive(context, engine, age), age) for age in ages if age > 0]
    total = 0.0
    for number, age in kept:
        prompts = min(number, of_engine / context.samples_per_prompt)
        total += reading_seconds(context, engine, prompts, context.prompt_tokens)
        total += reading_seconds(context, engine, number, age, behind=context.prompt_tokens)
    return total * min(1.0, most / max(1.0, sum(number for number, _ in kept)))  # what had no place has said nothing


def turn_seconds(context: PlanContext, engine: Engine, most: float, ages: Sequence[float], turn: float) -> float:
    """Seconds in which an engine with at most so many sequences at a time brings all samples on by `turn` tokens; `ages` are
    the tokens that those of each step under way have by now."""
    lengths, total = context.response_lengths, 0.0
    ends = sorted({0.0, turn, *(end - age for age in ages for end in lengths if 0 < end - age < turn)})
    for begin, end in pairwise(ends):
        middle = (begin + end) / 2
        alive = [_num_alive(context, engine, age + middle) for age in ages]
        number = sum(alive)
        tokens = context.prompt_tokens + middle + sum(map(mul, alive, ages)) / (number or 1.0)
        waves = max(1.0, number / most)  # those that have no place come after others
        total += (end - begin) * waves * step_seconds(context, engine, max(1.0, min(number, most)), tokens)
    return total


def _num_alive(context: PlanContext, engine: Engine, age: float) -> float:
    """Samples of a step that one engine goes on with behind so many tokens."""
    ended = bisect_right(context.response_lengths, age) / len(context.response_lengths)
    return _num_of_engine(context, engine) * (1 - ended)


def _num_of_engine(context: PlanContext, engine: Engine) -> float:
    """Samples of a step that one engine generates."""
    return context.num_sequences * engine.ranks / context.world_size


def prefill_seconds(context: PlanContext, engine: Engine, num_sequences: float) -> float:
    """Seconds of an engine's prompts, each once for its samples."""
    return reading_seconds(context, engine, num_sequences / context.samples_per_prompt, context.prompt_tokens)


def reading_seconds(context: PlanContext, engine: Engine, num_sequences: float, tokens: float, *, behind: float = 0.0) -> float:
    """Seconds in which an engine computes keys and values of so many tokens of each sequence, `behind` others that it has."""
    flops = 2 * active_parameters(engine.dims) * num_sequences * tokens
    flops += attention_flops(engine.dims, num_sequences * ((behind + tokens) ** 2 - behind**2))
    return flops / context.device.flops / PRODUCTS / engine.ranks


def step_seconds(context: PlanContext, engine: Engine, num_sequences: float, mean_tokens: float) -> float:
    """Seconds of one step of so many sequences, with so many tokens each."""
    dims, device = engine.dims, context.device
    reading = engine.read_bytes(num_sequences) / device.bandwidth / WEIGHTS
    computing = 2 * active_parameters(dims) * num_sequences / engine.ranks / device.flops / PRODUCTS
    keys = num_sequences * mean_tokens * engine.kv_per_token / device.bandwidth / KEYS
    fixed = dims.num_layers * (LAYER_S + (2 * REDUCE_S if engine.ranks > 1 else 0))
    host = num_sequences * (SEQUENCE_S * HIDDEN if engine.ranks == 1 else SHARED_SEQUENCE_S)
    return max(reading, computing) + keys + fixed + host
