"""Imports verl's model, its optimizer and schedule, the layout of trainer and generator, and sampling."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from rlcore_import.source import Source
from rlcore_import.verl_keys import ENGINES
from rlcore_import.verl_optimizer import ADAMS_BETAS, import_optimizer_kind
from rlcore_import.verl_rows import ACTOR, MODEL, ROLLOUT

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
MEGATRON_LAYERS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The parts of each of Megatron's fused layers."""


@frozen(kw_only=True)
class Engine:
    """The keys of sizes and of the schedule that one of verl's engines reads."""

    trainer: str
    section: str
    """The engine's table within the actor's."""
    sizes: tuple[tuple[str, str], ...]
    """Sizes of the layout: verl's key, and rlcore's option."""
    decay: str = "lr_scheduler_type"
    least: str = "min_lr_ratio"
    least_is_rate: bool = False
    """True where `least` is a rate, not a share of the peak."""
    counts_warmup: bool = True
    """True where the engine reads `lr_warmup_steps`."""


_FSDP = Engine(trainer="fsdp2", section="fsdp_config", sizes=(("ulysses_sequence_parallel_size", "context_parallel"),))
_MEGATRON = Engine(
    trainer="megatron",
    section="megatron",
    sizes=(
        ("tensor_model_parallel_size", "tensor_parallel"),
        ("pipeline_model_parallel_size", "pipeline_parallel"),
        ("virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel"),
        ("context_parallel_size", "context_parallel"),
        ("expert_model_parallel_size", "expert_parallel"),
        ("expert_tensor_parallel_size", "expert_tensor_parallel"),
    ),
    decay="lr_decay_style",
    least="min_lr",
    least_is_rate=True,
)
_VEOMNI = Engine(
    trainer="fsdp2",
    section="veomni",
    sizes=(("ulysses_parallel_size", "context_parallel"), ("expert_parallel_size", "expert_parallel")),
    least="lr_min",
    least_is_rate=True,
    counts_warmup=False,
)
_TORCHTITAN = Engine(
    trainer="fsdp2",
    section="torchtitan",
    sizes=(
        ("tensor_parallel_size", "tensor_parallel"),
        ("context_parallel_size", "context_parallel"),
        ("expert_parallel_size", "expert_parallel"),
        ("data_parallel_replicate_size", "replicate"),
    ),
    decay="decay_type",
    least="min_lr_factor",
)
_TURBO = evolve(
    _FSDP,
    sizes=(
        ("turbo_config.distributed.ulysses_parallel_size", "context_parallel"),
        ("turbo_config.distributed.tensor_parallel_size", "tensor_parallel"),
        ("turbo_config.distributed.expert_parallel_size", "expert_parallel"),
    ),
)
STRATEGIES = {
    "fsdp": _FSDP,
    "fsdp2": _FSDP,
    "fsdp_turbo": _TURBO,
    "megatron": _MEGATRON,
    "veomni": _VEOMNI,
    "torchtitan": _TORCHTITAN,
}


def engine_of(source: Source) -> Engine:
    """Return the engine that the actor's strategy names, or FSDP for an unknown one."""
    return STRATEGIES.get(str(source.look(f"{ACTOR}.strategy") or "fsdp"), _FSDP)


def import_model(source: Source, values: dict[str, Any]) -> None:
    """Import the model, its chat template and its adapters."""
    values["model.path"] = source.text(f"{MODEL}.path", "")
    if not values["model.path"]:
        source.refuse(f"{MODEL}.path", "the model to train")
    tokenizer = source.text(f"{MODEL}.tokenizer_path")
    if tokenizer not in (None, values["model.path"]):
        source.report(f"{MODEL}.tokenizer_path", "the tokenizer is the model's own")
    if source.flag(f"{MODEL}.trust_remote_code"):
        values["model.trust_remote_code"] = True
    if template := source.text(f"{MODEL}.custom_chat_template"):
        values["model.chat_template"] = template
    for name, value in source.table("data.apply_chat_template_kwargs").items():
        if value is not None:
            values[f"model.chat_template_kwargs.{name}"] = value
    _adapters(source, values)


def _adapters(source: Source, values: dict[str, Any]) -> None:
    """Import adapters: FSDP reads `lora_rank` and related keys, Megatron the table `lora`."""
    names = ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path", "exclude_modules")
    of_peft = tuple(f"{MODEL}.{name}" for name in names)
    table = f"{MODEL}.lora"
    of_megatron = tuple(f"{table}.{name}" for name in ("rank", "alpha", "target_modules", "adapter_path", "exclude_modules"))
    is_megatron = engine_of(source).trainer == "megatron"
    if is_megatron and source.look(of_peft[0]) and not source.look(of_megatron[0]):
        source.report(of_peft[0], "with Megatron verl reads model.lora.rank, and trains all weights without it")
    rank_key, alpha_key, targets_key, path_key, excluded_key = of_megatron if is_megatron else of_peft
    source.ignore(*(of_peft if is_megatron else (table,)))
    rank, path = source.integer(rank_key, 0, least=0), source.text(path_key)
    if not rank:
        if path:
            source.report(path_key, "lora.init_from takes it, with the rank, alpha and targets of that directory")
        source.ignore(table, *of_peft)
        return
    values |= {"lora.rank": rank, "lora.alpha": source.number(alpha_key, 32.0 if is_megatron else 16.0, above=0)}
    targets = source.take(targets_key, list(MEGATRON_LAYERS) if is_megatron else "all-linear")
    values["lora.targets"] = _targets(source, targets_key, [targets] if isinstance(targets, str) else list(targets))
    if excluded := source.take(excluded_key):
        source.report(excluded_key, f"lora.targets names what has adapters, {excluded!r:.40} too")
    if path:
        values["lora.init_from"] = path
        if source.look(f"{ACTOR}.use_kl_loss") or source.look("algorithm.use_kl_in_reward"):
            source.report(path_key, "the reference begins with these adapters, too, where there it has none")
    if is_megatron and (dropout := source.number(f"{table}.dropout", 0.0, least=0)):
        values["lora.dropout"] = dropout


def _targets(source: Source, key: str, names: Iterable[Any]) -> list[str]:
    found: dict[str, None] = {}
    for name in map(str, names):
        if len(MEGATRON_LAYERS.get(name, ())) > 1:
            source.report(key, f"each part of {name} has an adapter of its own")
        found |= dict.fromkeys(MEGATRON_LAYERS.get(name, (name,)))
    return list(found)


def import_optimizer(source: Source, values: dict[str, Any]) -> None:
    """Import the optimizer, and the schedule of its rate."""
    prefix = f"{ACTOR}.optim"
    import_optimizer_kind(source, values, prefix, is_megatron=engine_of(source) is _MEGATRON)
    values["optimizer.learning_rate"] = source.number(f"{prefix}.lr", 1e-6, above=0)
    values["optimizer.weight_decay"] = decay = source.number(f"{prefix}.weight_decay", 0.01, least=0)
    if decay and engine_of(source) is not _MEGATRON and "lora.rank" not in values:
        source.report(f"{prefix}.weight_decay", "biases and norms are not decayed")
    values["optimizer.betas"] = betas = [float(beta) for beta in source.take(f"{prefix}.betas", ADAMS_BETAS)]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        source.refuse(f"{prefix}.betas", "two numbers of at least 0 and below 1")
    elif engine_of(source) is _MEGATRON and betas != ADAMS_BETAS:
        source.report(f"{prefix}.betas", f"{ADAMS_BETAS}: verl does not pass betas on to Megatron")
        values["optimizer.betas"] = ADAMS_BETAS
    if eps := source.number(f"{prefix}.eps", above=0):
        values["optimizer.eps"] = eps
    # Engines since 2026 read optim.clip_grad; FSDP's workers before them grad_clip.
    keys = [f"{prefix}.clip_grad", f"{ACTOR}.grad_clip"]
    if source.look("model_engine") is None and engine_of(source).section == _FSDP.section:
        keys.reverse()
    clips = [source.number(key, least=0) for key in keys]
    values["optimizer.max_grad_norm"] = next((clip for clip in clips if clip is not None), 1.0)
    if None not in clips and clips[0] != clips[1]:
        source.report(keys[1], f"{keys[0]} counts: {clips[0]:g}")
    _schedule(source, values, prefix)


def _schedule(source: Source, values: dict[str, Any], prefix: str) -> None:
    """Import the schedule. verl changes the rate once a training step and counts lengths in training steps.

    Its trainer `separate_async` changes the rate once an update and counts updates.
    """
    engine = engine_of(source)
    updates = values["training.minibatches_per_step"] * values["training.epochs_per_step"]
    counts_updates = bool(source.look("trainer.use_v1")) and source.look("trainer.v1.trainer_mode") == "separate_async"
    whole = values["run.num_steps"] * (updates if counts_updates else 1)
    length = source.integer(f"{prefix}.lr_decay_steps", least=1)
    warmup = _warmup(source, prefix, engine, length if engine is _MEGATRON and length else whole, counts_updates=counts_updates)
    values["schedule.warmup_steps"] = warmup * (1 if counts_updates else updates)
    key = f"{prefix}.{engine.decay}"
    if engine.section == _FSDP.section and source.text(f"{prefix}.warmup_style"):
        key = f"{prefix}.warmup_style"  # the older name, which counts where it is set
    decay = source.text(key, {_TORCHTITAN.section: "linear", _VEOMNI.section: "cosine"}.get(engine.section, "constant"))
    least = source.number(f"{prefix}.{engine.least}", 0.0, least=0)
    source.ignore(*(f"{prefix}.{name}" for name in ("lr_scheduler_type", "lr_decay_style", "decay_type", "warmup_style")))
    source.ignore(*(f"{prefix}.{name}" for name in ("min_lr_ratio", "min_lr", "lr_min", "min_lr_factor", "lr_decay_steps")))
    if decay not in ("cosine", "linear"):
        if decay != "constant":
            source.report(key, "no such schedule: the rate is constant")
        return
    ratio = least / values["optimizer.learning_rate"] if engine.least_is_rate else least
    values |= {"schedule.decay": decay, "schedule.min_learning_rate_ratio": min(1.0, ratio)}
    if ratio > 1:
        source.report(f"{prefix}.{engine.least}", "a decay ends at the peak at most")
    if values.get("critic.warmup_steps"):
        source.report("trainer.critic_warmup", "the policy's decay ends with the run, there as many steps behind it")
    if updates > 1 and not counts_updates:
        source.report(key, "the rate falls with each update, where there it falls once a training step")
    if engine is _MEGATRON and length not in (None, whole):
        source.report(f"{prefix}.lr_decay_steps", f"the decay ends with the run, where there it ends after {length} steps")


def _warmup(source: Source, prefix: str, engine: Engine, length: int, *, counts_updates: bool) -> int:
    """Return the steps of the warm-up; its ratio is a share of `length`."""
    steps = source.integer(f"{prefix}.lr_warmup_steps", -1)
    share = source.number(f"{prefix}.lr_warmup_steps_ratio", 0.0, least=0, most=1)
    if not engine.counts_warmup and steps > 0:
        source.report(f"{prefix}.lr_warmup_steps", "this engine reads lr_warmup_steps_ratio alone", changes_meaning=False)
    is_counted = engine.counts_warmup and steps > 0
    steps = steps if is_counted else int(share * length)
    notes = [] if counts_updates else ["the rate rises with each update, where there it rises once a training step"]
    notes += [] if engine is _TORCHTITAN else ["the first step has a part of the rate, where there it has none"]
    if steps and notes:
        source.report(f"{prefix}.lr_warmup_steps{'' if is_counted else '_ratio'}", "; ".join(notes))
    return steps


def import_trainer(source: Source, values: dict[str, Any]) -> None:
    """Import the trainer, its layout and its offloading."""
    name, engine = source.text(f"{ACTOR}.strategy", "fsdp"), engine_of(source)
    if name not in STRATEGIES:
        source.report(f"{ACTOR}.strategy", "no such engine: fsdp2 is taken, and the schedule is read as that of fsdp")
    elif name not in ("fsdp", "fsdp2", "megatron"):
        source.report(f"{ACTOR}.strategy", "its layout is that of fsdp2", changes_meaning=False)
    source.ignore(*(f"{ACTOR}.{section}" for section in ENGINES if section != engine.section))
    if engine is not _TURBO:
        source.ignore(f"{ACTOR}.fsdp_config.turbo_config")
    else:
        source.ignore(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    values["trainer.name"] = engine.trainer
    prefix, ours = f"{ACTOR}.{engine.section}", f"trainer.{engine.trainer}"
    for theirs, size in engine.sizes:
        values[f"{ours}.{size}"] = source.integer(f"{prefix}.{theirs}", 1, least=1)
    older = source.integer(f"{ACTOR}.ulysses_sequence_parallel_size", 1, least=1)
    if older > 1 and engine is _FSDP:
        values[f"{ours}.context_parallel"] = older  # the older place, which overrules the newer one
    elif older > 1:
        source.report(f"{ACTOR}.ulysses_sequence_parallel_size", "of the engine fsdp alone", changes_meaning=False)
    recomputes = source.flag(f"{MODEL}.enable_gradient_checkpointing", default=True)
    if engine is _MEGATRON:
        _recompute(source, values, prefix, recomputes=recomputes)
    else:
        values[f"{ours}.activation_checkpointing"] = recomputes
        _fsdp(source, values, engine, prefix)
    _layout(source, values, engine, prefix)
    _compute(source, values, prefix)
    _memory(source, values, prefix, values.get(f"{ours}.context_parallel", 1))


def _layout(source: Source, values: dict[str, Any], engine: Engine, prefix: str) -> None:
    """Refuse sizes that do not divide the ranks."""
    ours, world = f"trainer.{engine.trainer}", values["cluster.nodes"] * values["cluster.gpus_per_node"]
    if values.get(f"{ours}.virtual_pipeline_parallel", 1) > 1 and values[f"{ours}.pipeline_parallel"] == 1:
        source.report(f"{prefix}.virtual_pipeline_model_parallel_size", "there is one stage", changes_meaning=False)
        values[f"{ours}.virtual_pipeline_parallel"] = 1
    groups = (("tensor", "context", "pipeline"), ("expert", "expert_tensor", "pipeline"))
    for names in groups if engine is _MEGATRON else groups[:1]:
        sizes = [values.get(f"{ours}.{name}_parallel", 1) for name in names]
        if world % math.prod(sizes):
            keys = {size: f"{prefix}.{theirs}" for theirs, size in engine.sizes}
            key = next(keys[f"{name}_parallel"] for name, size in zip(names, sizes, strict=True) if size > 1)
            expected = f"sizes of {', '.join(names)} parallelism whose product divides {world} ranks; it is {math.prod(sizes)}"
            source.refuse(key, expected)


def _recompute(source: Source, values: dict[str, Any], prefix: str, *, recomputes: bool) -> None:
    if source.look(f"{prefix}.expert_tensor_parallel_size") is None:  # as many as tensor_parallel, for Megatron
        tensor, expert, stages = (values[f"trainer.megatron.{name}_parallel"] for name in ("tensor", "expert", "pipeline"))
        divides = values["cluster.nodes"] * values["cluster.gpus_per_node"] % (tensor * expert * stages) == 0
        values["trainer.megatron.expert_tensor_parallel"] = tensor if expert > 1 and divides else 1
    granularity = source.text(f"{prefix}.override_transformer_config.recompute_granularity")
    values["trainer.megatron.recompute"] = (
        granularity if granularity in ("full", "selective") else "full" if recomputes else "none"
    )
    if source.flag(f"{ACTOR}.freeze_vision_tower"):
        values["trainer.megatron.freeze"] = "vision"


def _fsdp(source: Source, values: dict[str, Any], engine: Engine, prefix: str) -> None:
    if source.flag(f"{ACTOR}.freeze_vision_tower"):
        values["trainer.fsdp2.freeze"] = "vision"
    offloads = "enable_fsdp_offload" if engine is _VEOMNI else "offload_policy"
    if engine is not _TORCHTITAN and source.flag(f"{prefix}.{offloads}"):
        values["trainer.fsdp2.cpu_offload"] = True
    if engine.section == _FSDP.section and not source.flag(f"{prefix}.reshard_after_forward", default=True):
        values["trainer.fsdp2.reshard_after_forward"] = False
    if engine is _TORCHTITAN:
        if source.integer(f"{prefix}.pipeline_parallel_size", 1) > 1:
            source.report(f"{prefix}.pipeline_parallel_size", "fsdp2 has no stages: trainer.megatron.pipeline_parallel has")
        return
    world = values["cluster.nodes"] * values["cluster.gpus_per_node"]
    shards = source.integer(f"{prefix}.fsdp_size", -1)
    if not 0 < shards < world:
        return
    others = values["trainer.fsdp2.context_parallel"] * values.get("trainer.fsdp2.expert_parallel", 1)
    if world % shards == 0 and (world // (world // shards)) % others == 0:
        values["trainer.fsdp2.replicate"] = world // shards
    else:
        what = f"weights are divided over all ranks: {world} ranks in shards of {shards} do not go with the layout"
        source.report(f"{prefix}.fsdp_size", what, changes_meaning=False)


def _compute(source: Source, values: dict[str, Any], prefix: str) -> None:
    written = source.text(f"{prefix}.dtype", "bfloat16")
    values["model.dtype"] = DTYPES.get(written, "bfloat16")
    if written not in DTYPES:
        source.report(f"{prefix}.dtype", "bfloat16 is taken: gradients in float16 would need a loss scale")


def _memory(source: Source, values: dict[str, Any], prefix: str, context_parallel: int) -> None:
    state, weights = source.flag(f"{prefix}.optimizer_offload"), source.flag(f"{prefix}.param_offload")
    values["offload.trainer"] = "all" if weights else "state" if state else "none"
    longest = values["rollout.max_prompt_tokens"] + values["rollout.max_response_tokens"]
    most = source.integer(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384, least=1)
    each = source.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu", least=1)
    dynamic = source.flag(f"{ACTOR}.use_dynamic_bsz")
    values["training.max_tokens_per_microbatch"] = most * context_parallel if dynamic or not each else each * longest


def import_generator(source: Source, values: dict[str, Any]) -> None:
    """Import the generator and the sampling."""
    name = source.text(f"{ROLLOUT}.name", "vllm")
    if name not in ("vllm", "???"):
        source.report(f"{ROLLOUT}.name", "samples come from vLLM, whose numerics are others", changes_meaning=False)
    values["generator.name"] = "vllm"
    values["rollout.temperature"] = source.number(f"{ROLLOUT}.temperature", 1.0, above=0)
    values["rollout.top_k"] = max(0, source.integer(f"{ROLLOUT}.top_k", -1))
    values["rollout.top_p"] = source.number(f"{ROLLOUT}.top_p", 1.0, above=0, most=1)
    ranks, gpus = source.integer(f"{ROLLOUT}.tensor_model_parallel_size", 1, least=1), values["cluster.gpus_per_node"]
    if ranks > gpus:
        source.report(f"{ROLLOUT}.tensor_model_parallel_size", f"an engine lies on one machine: {gpus}", changes_meaning=False)
    values["generator.vllm.tensor_parallel"] = ranks = min(ranks, gpus)
    _truncation(source, values, ranks)
    share = source.number(f"{ROLLOUT}.gpu_memory_utilization", 0.5, above=0, most=1)
    values["generator.vllm.gpu_memory_utilization"] = share
    if source.flag(f"{ROLLOUT}.enforce_eager"):
        values["generator.vllm.enforce_eager"] = True
    if not source.flag(f"{ROLLOUT}.enable_prefix_caching", default=True):
        values["generator.vllm.prefix_caching"] = False
    if not source.flag(f"{ROLLOUT}.free_cache_engine", default=True):
        values["offload.generator_sleep_mode"] = False
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if found := source.integer(f"{ROLLOUT}.{key}", least=1):
            values[f"generator.vllm.{key}"] = found
    replays = source.flag(f"{ROLLOUT}.enable_rollout_routing_replay")
    for key in (f"{ACTOR}.router_replay.mode", f"{ACTOR}.megatron.router_replay.mode", f"{ACTOR}.veomni.router_replay.mode"):
        mode = source.text(key, "disabled")
        replays = replays or mode == "R3"
        if mode not in ("disabled", "R3"):
            source.report(key, "rollout.replay_routing replays the generator's choices alone")
    if replays:
        values["rollout.replay_routing"] = True
    if source.flag(f"{ROLLOUT}.multi_turn.enable"):
        source.report(f"{ROLLOUT}.multi_turn.enable", "turns and tools are the environment's: choose one that has them")


def _truncation(source: Source, values: dict[str, Any], ranks: int) -> None:
    """Import top_k and top_p of training; verl's trainer normalises over all tokens."""
    if values["rollout.top_k"] == 0 and values["rollout.top_p"] >= 1:
        return
    key = f"{ROLLOUT}.top_p" if values["rollout.top_p"] < 1 else f"{ROLLOUT}.top_k"
    if values["algorithm.name"] == "distill":
        source.refuse(key, "all tokens: the algorithm distill samples from the whole distribution")
    elif ranks > 1:
        values["rollout.accept_truncation_bias"] = True
        why = "the trainer normalises over all tokens, since an engine of several ranks does not say which it kept"
        source.report(key, why)
    else:
        source.report(key, "the trainer normalises over the tokens that the generator kept, there over all of them")
