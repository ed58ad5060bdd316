"""The settings of one engine: vLLM's arguments and where it runs. Picklable, for engines in processes of their own."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, frozen

from rlcore.gpu import device_memories
from rlcore.model_files import CONFIG_FILE, read_object, reads_images
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckContext, GeneratorContext, LoraSpec, ModelError, ModelSpec, find_channel
from rlcore_torchkit.adapters.lora_targets import targeted
from rlcore_torchkit.huggingface.models import load_model, model_errors
from rlcore_torchkit.trainer.trainer_plan import planned_model
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.memory import LARGEST_SHARE, UNPLANNED_BOTH, UNPLANNED_SHARE, copies_bytes
from rlcore_vllm.setup.speculation import drafts_sometimes, num_guessed, speculative_arguments

GIB = 2**30
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM takes; adapters of a smaller one are filled up with zeros."""
FLOAT32_HEAD = {"head_dtype": "float32"}
"""An entry of vLLM's hf_overrides: in a model's own bfloat16 the head would round logits, and the model runner V2 of 0.26 once
more after it divides them by the temperature."""
GRAPH_SIZES = frozenset({"cudagraph_capture_sizes", "max_cudagraph_capture_size"})
"""vLLM's arguments, and keys of its compilation_config, for the sizes of CUDA graphs."""
LEAST_BESIDE = 32
"""Tokens of prompts, beside those of all sequences, of the first graph that is captured for both."""
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["all"]}
"""vLLM's compilation_config with its own kernels, in CUDA graphs where all sequences decode, and nothing compiled of torch's
operations: what a compiler fuses it rounds otherwise."""
FP8 = {"fp8": "fp8_per_tensor", "fp8_per_block": "fp8_per_block"}
"""vLLM's names for what a section's `quantization` says."""
ROUTERS = r"re:.*\.(gate|router|shared_expert_gate)$"
"""vLLM's layers that choose experts. It quantises some of them with the others, and 3 bits of mantissa move tokens to other
experts."""


@frozen(kw_only=True)
class EngineSettings:
    """One engine's settings."""

    model: ModelSpec
    device: Literal["cpu", "cuda"]
    in_process: bool
    """True where the engine shares its process with the trainer, whose surroundings it must then leave alone."""
    tensor_parallel: int
    eager: bool
    """True where nothing is compiled, the sampler included."""
    arguments: Mapping[str, Any]
    """Arguments of vLLM's EngineArgs, by its names."""
    batch_invariant: bool = False
    """True where what is computed of a token is the same bits in every batch."""
    metrics_file: Path | None = None
    """File for vLLM's own metrics; None where they are not kept."""

    @property
    def has_drafter(self) -> bool:
        """Return whether a model guesses tokens."""
        return "draft_load_config" in self.arguments.get("speculative_config", {})

    def load_tokenizer(self) -> Any:
        """The model's tokenizer, which only stop strings need."""
        from transformers import AutoTokenizer

        spec = self.model
        return AutoTokenizer.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def with_devices(config: VllmConfig, devices: tuple[int, ...] | None) -> VllmConfig:
    """The section with the devices that the run sets aside for generation, where it names none itself."""
    return evolve(config, devices=devices) if config.devices is None else config


def engine_settings(context: GeneratorContext, config: VllmConfig) -> EngineSettings:
    """The settings of each engine of a generator."""
    device = context.rank_info.device
    eager = device == "cpu" if config.enforce_eager is None else config.enforce_eager
    reads_weights = context.channel is None
    # An output head that is quantised knows no dtype but its own.
    head: Mapping[str, Any] = {} if reads_weights and not config.batch_invariant else FLOAT32_HEAD
    arguments: dict[str, Any] = {
        "model": context.model.path,
        "revision": context.model.revision,
        "trust_remote_code": context.model.trust_remote_code,
        "dtype": context.model.dtype,
        "seed": context.seed % 2**31,
        "max_model_len": context.max_sequence_length,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else "uni",
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": batched_tokens(config),
        "enforce_eager": eager,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "load_format": "hf" if reads_weights else "dummy",  # a trainer's weights replace dummies before anything is generated
        "config_format": "hf",  # "auto" takes Mistral's params.json and consolidated files in place of what is trained
        "worker_extension_cls": "rlcore_vllm.ranks.worker.WorkerExtension",
        "weight_transfer_config": {"backend": "rlcore"},
        **image_arguments(context.model),
    }
    if context.routed_experts:
        arguments["enable_return_routed_experts"] = True
    if context.lora is not None:
        arguments |= adapter_arguments(context.model, context.lora, context.max_adapters)
    if device == "cpu":
        arguments |= {
            "kv_cache_memory_bytes": int(config.cpu_kv_cache_gib * GIB),
            # A prompt computed in parts makes vLLM rewind the sample's seed, which torch's generators for CPU cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": batched_tokens(config, context.max_sequence_length),
            **latent_arguments(context.model),
        }
    else:
        arguments |= {
            "gpu_memory_utilization": memory_share(config, context) / engines_per_device(config),
            "enable_sleep_mode": not reads_weights,
            **({} if eager or _names_graphs(config) else {"cudagraph_capture_sizes": capture_sizes(config)}),
        }
    if config.quantization != "none":
        arguments |= {"quantization": FP8[config.quantization], "quantization_config": {"ignore": [ROUTERS]}}
    arguments |= speculative_arguments(config, device) | invariant_arguments(config, eager=eager)
    if config.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = config.kv_cache_dtype
    return EngineSettings(
        model=context.model,
        device=device,
        in_process=context.channel is not None and find_channel(context.channel).reach == "process",
        tensor_parallel=config.tensor_parallel,
        eager=eager,
        arguments=arguments | dict(config.engine) | {"hf_overrides": head | _overrides(config)},
        batch_invariant=config.batch_invariant,
    )


def batched_tokens(config: VllmConfig, longest_prompt: int = 0) -> int:
    """Return the most tokens of a step, at least one for each sequence. Where a model drafts, vLLM takes one more for each."""
    drafted = config.max_num_seqs if config.has_drafter else 0
    return drafted + max(config.max_num_batched_tokens, config.max_num_seqs, longest_prompt)


def invariant_arguments(config: VllmConfig, *, eager: bool) -> dict[str, Any]:
    """Return the arguments that make an engine compute by the trainer's kernels; nothing where it need not."""
    if not config.batch_invariant:
        return {}
    return {"attention_backend": "FLASH_ATTN"} | ({} if eager else {"compilation_config": dict(UNCOMPILED)})


def latent_arguments(model: ModelSpec) -> dict[str, Any]:
    """Return the arguments of latent attention on a CPU; nothing for models without it. Where the processor has AMX, vLLM 0.32
    takes a kernel that refuses float32."""
    file = _config_file(model)
    content = None if file is None else read_object(file)
    return {"attention_backend": "CPU_MLA"} if isinstance(content, dict) and content.get("kv_lora_rank") else {}


def image_arguments(model: ModelSpec) -> dict[str, Any]:
    """Return the arguments for a model that reads images, by its config.json, local or fetched by the driver; nothing for
    others."""
    file = _config_file(model)
    content = None if file is None else read_object(file)
    if not isinstance(content, dict) or not reads_images(content):
        return {}
    return {
        # It reads images beside a prompt by its tokenizer; and what it keeps of them would outlive a refit.
        "skip_tokenizer_init": False,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"video": 0},
        # Dummy weights would overwrite the processor's mean and deviation, which are no weights that a trainer sends.
        "load_format": "hf",
    }


def _config_file(model: ModelSpec) -> Path | None:
    """The model's config.json, here or where the driver has fetched it from the Hub; None where there is none."""
    local = expanded(model.path) / CONFIG_FILE
    if local.is_file():
        return local
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        file = cached_file(model.path, CONFIG_FILE, revision=model.revision, local_files_only=True, **quiet)
    except OSError:  # of what can be no name on the Hub, such as a directory that is not here: others say that it is missing
        return None
    return None if file is None else Path(file)


def adapter_arguments(model: ModelSpec, spec: LoraSpec, max_adapters: int) -> dict[str, Any]:
    """Return the arguments that make vLLM leave room for so many adapters beside the layers that have one, and no others."""
    import torch

    from rlcore_torchkit.adapters.lora import linear_layers_of

    empty = load_model(model, dtype=torch.float32, device="meta", any_decoder=True)
    layers = targeted(linear_layers_of(empty), spec)
    return {
        "enable_lora": True,
        "max_loras": max_adapters,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= spec.rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }


def _names_graphs(config: VllmConfig) -> bool:
    """Return whether the section's own table names the batches that graphs are captured for, beside which vLLM takes no other
    sizes."""
    compilation = config.engine.get("compilation_config")
    tables = (config.engine, compilation if isinstance(compilation, Mapping) else {})
    return any(not GRAPH_SIZES.isdisjoint(table) for table in tables)


def _overrides(config: VllmConfig) -> dict[str, Any]:
    """Return the hf_overrides that the section names."""
    table = config.engine.get("hf_overrides", {})
    assert isinstance(table, Mapping)  # checked before the run
    return dict(table)


def capture_sizes(config: VllmConfig) -> list[int]:
    """Return the batch sizes, in tokens, of CUDA graphs: up to one step of all sequences, and up to `max_num_seqs` tokens of
    prompts beside them. Larger batches are launched kernel by kernel, which took 110 ms for 34 with a model of experts. There
    are four sizes between a power of two and the next, as each takes 0.1 s to capture, and closer ones above all sequences,
    where most steps lie while samples wait."""
    max_num_seqs, tokens = config.max_num_seqs, 1 + num_guessed(config)
    sizes = _batches(max_num_seqs, tokens)
    # vLLM drops sizes above a step's, and where it guesses those that are no multiple of a sequence's tokens.
    most = max(1, batched_tokens(config) // tokens)
    if not drafts_sometimes(config):
        return sorted({tokens * min(size, most) for size in sizes})
    assert config.speculative_most_sequences is not None
    most = min(most, config.speculative_most_sequences)
    plain = {min(size, batched_tokens(config)) for size in _batches(max_num_seqs, 1)}
    return sorted(plain | {tokens * min(size, most) for size in sizes})


def _batches(max_num_seqs: int, tokens: int) -> list[int]:
    """Return the sizes of graphs in sequences of so many tokens."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 1) // 4))
    sizes = [*(size for size in sizes if size < max_num_seqs), max_num_seqs]
    beside = LEAST_BESIDE
    while beside < max_num_seqs:
        sizes.append(max_num_seqs + math.ceil(beside / tokens))
        beside *= 2
    return [*sizes, max_num_seqs + math.ceil(max_num_seqs / tokens)]


def memory_share(config: VllmConfig, context: GeneratorContext | CheckContext) -> float:
    """Return the share of a device for all of its engines. Where nothing planned "auto", it depends on whether the channel lets
    a trainer be on the device, and on the size of copies of weights, by the device and the model's config.json; it is far
    smaller where these are not known."""
    if config.gpu_memory_utilization != "auto":
        return config.gpu_memory_utilization
    is_alone = context.channel is None or find_channel(context.channel).reach == "separate"
    share = LARGEST_SHARE if is_alone else UNPLANNED_SHARE
    if not keeps_copies(context):
        return share
    copies = copies_share(config, context)
    if copies is None:
        return UNPLANNED_SHARE if is_alone else UNPLANNED_BOTH
    return max(math.floor(100 * (share - copies) + 1e-6) / 100, 0.01)


def keeps_copies(context: GeneratorContext | CheckContext) -> bool:
    """Return whether refits leave copies of weights on the devices of engines, which vLLM does not count."""
    return context.delta == "device" and context.channel is not None


def copies_share(config: VllmConfig, context: GeneratorContext | CheckContext) -> float | None:
    """Return the share of copies of weights on the engines' smallest device; None where that or the model is not known here."""
    memories, file = device_memories() or [], _config_file(context.model)
    devices = (0,) if config.devices is None else config.devices
    content = None if file is None else read_object(file)
    if not isinstance(content, dict) or not 0 <= max(devices, default=-1) < len(memories):
        return None
    try:
        dims = planned_model(content).dims
    except ModelError:
        return None
    copies = copies_bytes(dims, context.model.dtype, context.channel, engines_per_device(config))
    return copies / min(memories[device] for device in devices)


def engines_per_device(config: VllmConfig) -> int:
    """The number of engines on the CUDA device that most of them share."""
    num_devices = 1 if config.devices is None else len(config.devices)
    return -(-config.replicas * config.tensor_parallel // num_devices)


def replica_devices(config: VllmConfig, own_device: int) -> list[tuple[int, ...]]:
    """The CUDA devices of each engine, counted among those that this process sees."""
    devices = (own_device,) if config.devices is None else config.devices
    width = config.tensor_parallel
    return [tuple(devices[(index * width + rank) % len(devices)] for rank in range(width)) for index in range(config.replicas)]


def vocab_size(model: ModelSpec) -> int:
    """Rows of the model's embedding, by its configuration."""
    return int(_hf_config(model).get_text_config().vocab_size)


def _hf_config(model: ModelSpec) -> Any:
    from transformers import AutoConfig

    with model_errors(model.path):
        return AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
