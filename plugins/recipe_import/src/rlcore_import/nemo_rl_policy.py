"""Model, lengths, optimizer, layout and cluster of NeMo-RL's recipes."""

from collections.abc import Mapping
from typing import Any

from rlcore_import.source import Source

PROMPT_SHARE = 4
"""The longest prompt is this part of the longest sequence, where a recipe bounds both by it alone."""


def import_policy(source: Source, values: dict[str, Any], kind: str) -> None:
    """The keys below `policy`."""
    _model(source, values)
    _lengths(source, values, kind)
    _microbatches(source, values)
    is_megatron = bool(source.take("policy.megatron_cfg.enabled", False))
    source.take("policy.dtensor_cfg.enabled")
    if is_megatron:
        _megatron(source, values)
    else:
        _fsdp2(source, values)
    (_megatron_optimizer if is_megatron else _torch_optimizer)(source, values)
    _adapters(source, values, is_megatron=is_megatron)


def _model(source: Source, values: dict[str, Any]) -> None:
    path = str(source.take("policy.model_name", ""))
    values["model.path"] = path
    tokenizer = source.take("policy.tokenizer.name", path)
    if tokenizer != path:
        source.report("policy.tokenizer.name", "the tokenizer is the model's own")
    template = source.take("policy.tokenizer.chat_template")
    if isinstance(template, str) and template.lower() != "default":
        values["model.chat_template"] = template
    if keywords := source.take("policy.tokenizer.chat_template_kwargs"):
        values |= {f"model.chat_template_kwargs.{name}": value for name, value in keywords.items() if value is not None}
    precision = str(source.take("policy.precision", "bfloat16"))
    values["model.dtype"] = precision if precision in ("float32", "bfloat16") else "bfloat16"
    if precision not in ("float32", "bfloat16"):
        source.report("policy.precision", "bfloat16 is taken: gradients in float16 would need a loss scale")


def _lengths(source: Source, values: dict[str, Any], kind: str) -> None:
    """Prompt and answer are bounded together there, and each by itself here."""
    total = int(source.take("policy.max_total_sequence_length", 4096))
    prompt = min(total, int(source.take("data.max_input_seq_length", total)))
    answer = min(total, int(source.take("policy.generation.max_new_tokens", total))) if kind == "grpo" else total
    if prompt + answer > total:
        if prompt < total and answer == total:
            answer = total - prompt
        elif answer < total and prompt == total:
            prompt = total - answer
        else:
            prompt = max(1, total // PROMPT_SHARE)
            answer = max(1, min(answer, total - prompt))
        source.report(
            "policy.max_total_sequence_length",
            f"bounds prompt and answer together; here prompts have at most {prompt} tokens and answers {answer}",
        )
    values["rollout.max_prompt_tokens"] = prompt
    values["rollout.max_response_tokens"] = answer


def _microbatches(source: Source, values: dict[str, Any]) -> None:
    total = int(source.take("policy.max_total_sequence_length", 4096))
    tokens = total * int(source.take("policy.train_micro_batch_size", 1))
    for name in ("dynamic_batching", "sequence_packing"):
        found = source.take(f"policy.{name}.train_mb_tokens")
        if source.take(f"policy.{name}.enabled") and found:
            tokens = int(found)
    values["training.max_tokens_per_microbatch"] = tokens


def _fsdp2(source: Source, values: dict[str, Any]) -> None:
    prefix, section = "policy.dtensor_cfg", "trainer.fsdp2"
    values["trainer.name"] = "fsdp2"
    for theirs, ours in (
        ("tensor_parallel_size", "tensor_parallel"),
        ("context_parallel_size", "context_parallel"),
        ("expert_parallel_size", "expert_parallel"),
        ("dp_replicate_size", "replicate"),
    ):
        values[f"{section}.{ours}"] = int(source.take(f"{prefix}.{theirs}", 1))
    if values[f"{section}.tensor_parallel"] > 1:
        values[f"{section}.sequence_parallel"] = bool(source.take(f"{prefix}.sequence_parallel", False))
    else:
        source.take(f"{prefix}.sequence_parallel")
    for key in ("cpu_offload", "activation_checkpointing"):
        values[f"{section}.{key}"] = bool(source.take(f"{prefix}.{key}", False))


def _megatron(source: Source, values: dict[str, Any]) -> None:
    prefix, section = "policy.megatron_cfg", "trainer.megatron"
    values["trainer.name"] = "megatron"
    for theirs, ours in (
        ("tensor_model_parallel_size", "tensor_parallel"),
        ("pipeline_model_parallel_size", "pipeline_parallel"),
        ("context_parallel_size", "context_parallel"),
        ("expert_model_parallel_size", "expert_parallel"),
        ("expert_tensor_parallel_size", "expert_tensor_parallel"),
    ):
        values[f"{section}.{ours}"] = int(source.take(f"{prefix}.{theirs}", 1))
    is_divided, has_experts = values[f"{section}.tensor_parallel"] > 1, values[f"{section}.expert_parallel"] > 1
    divides_tokens = bool(source.take(f"{prefix}.sequence_parallel", False))
    if is_divided and not has_experts:
        values[f"{section}.sequence_parallel"] = divides_tokens
    recomputes = bool(source.take(f"{prefix}.activation_checkpointing", False))
    granularity = str(source.take(f"{prefix}.recompute_granularity", "full"))
    modules = source.take(f"{prefix}.recompute_modules")
    if recomputes:
        values[f"{section}.recompute"] = "selective" if granularity == "selective" else "full"
        if granularity == "selective" and modules:
            values[f"{section}.transformer.recompute_modules"] = list(modules)
    router = source.take(f"{prefix}.moe_router_dtype")
    if has_experts and router:
        values[f"{section}.transformer.moe_router_dtype"] = str(router)
    if source.take(f"{prefix}.fp8_cfg.enabled"):
        values[f"{section}.fp8"] = True
        values[f"{section}.transformer.fp8_recipe"] = str(source.take(f"{prefix}.fp8_cfg.fp8_recipe", "blockwise"))
    reduces = source.take(f"{prefix}.distributed_data_parallel_config.grad_reduce_in_fp32")
    if reduces is not None:
        values[f"{section}.ddp.grad_reduce_in_fp32"] = bool(reduces)


def _torch_optimizer(source: Source, values: dict[str, Any]) -> None:
    prefix = "policy.optimizer"
    name = str(source.take(f"{prefix}.name", "torch.optim.AdamW"))
    if not name.lower().endswith(("adamw", "fusedadam", "fused_adam.fusedadam")):
        source.report(f"{prefix}.name", "AdamW is the only optimizer")
    rate = float(source.take(f"{prefix}.kwargs.lr", 1e-6))
    values["optimizer.learning_rate"] = rate
    values["optimizer.betas"] = [float(beta) for beta in source.take(f"{prefix}.kwargs.betas", (0.9, 0.999))]
    values["optimizer.eps"] = float(source.take(f"{prefix}.kwargs.eps", 1e-8))
    values["optimizer.weight_decay"] = float(source.take(f"{prefix}.kwargs.weight_decay", 0.01))
    norm = source.take("policy.max_grad_norm")
    values["optimizer.max_grad_norm"] = 0.0 if norm is None else float(norm)
    stages = source.take("policy.scheduler")
    stages = [stages] if isinstance(stages, Mapping) else stages or []
    warmup = 0
    for stage in stages:
        warmup += _stage(source, values, stage, rate)
    values["schedule.warmup_steps"] = warmup


def _stage(source: Source, values: dict[str, Any], stage: Any, rate: float) -> int:
    """One of torch's schedulers; returns the steps that it warms up for."""
    if not isinstance(stage, Mapping) or "name" not in stage:
        return 0  # the milestones between the others
    name, given = str(stage["name"]).rpartition(".")[2], stage.get("kwargs") or {}
    if name == "ConstantLR" and float(given.get("factor", 1.0)) == 1.0:
        return 0
    if name == "LinearLR":
        start, end = float(given.get("start_factor", 1 / 3)), float(given.get("end_factor", 1.0))
        steps = int(given.get("total_iters", 5))
        if start < end:
            source.report("policy.scheduler", f"the warm-up begins at 0, where there it begins at {start:g} of the rate")
            return steps
        if start > end:
            values |= {"schedule.decay": "linear", "schedule.min_learning_rate_ratio": end}
            source.report("policy.scheduler", f"the decay ends with the run, where there it ends after {steps} steps")
        return 0
    if name == "CosineAnnealingLR":
        values |= {
            "schedule.decay": "cosine",
            "schedule.min_learning_rate_ratio": min(1.0, float(given.get("eta_min", 0.0)) / rate),
        }
        source.report("policy.scheduler", f"the decay ends with the run, where there T_max is {given.get('T_max')}")
        return 0
    source.report("policy.scheduler", f"no schedule {name} is here: it is left out")
    return 0


def _megatron_optimizer(source: Source, values: dict[str, Any]) -> None:
    prefix, schedule = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
    if str(source.take(f"{prefix}.optimizer", "adam")) != "adam":
        source.report(f"{prefix}.optimizer", "AdamW is the only optimizer")
    rate = float(source.take(f"{prefix}.lr", 1e-6))
    least = float(source.take(f"{prefix}.min_lr", 0.0))
    values["optimizer.learning_rate"] = rate
    values["optimizer.betas"] = [
        float(source.take(f"{prefix}.adam_beta{number}", beta)) for number, beta in ((1, 0.9), (2, 0.999))
    ]
    values["optimizer.eps"] = float(source.take(f"{prefix}.adam_eps", 1e-8))
    values["optimizer.weight_decay"] = float(source.take(f"{prefix}.weight_decay", 0.0))
    clip, norm = source.take(f"{prefix}.clip_grad"), source.take("policy.max_grad_norm")
    values["optimizer.max_grad_norm"] = float(clip if clip is not None else norm or 0.0)
    values["schedule.warmup_steps"] = int(source.take(f"{schedule}.lr_warmup_iters", 0) or 0)
    style = str(source.take(f"{schedule}.lr_decay_style", "constant"))
    if style in ("linear", "cosine"):
        values["schedule.decay"] = style
        values["schedule.min_learning_rate_ratio"] = min(1.0, least / rate)
    elif style != "constant":
        source.report(f"{schedule}.lr_decay_style", "no such decay: the rate is constant")


def _adapters(source: Source, values: dict[str, Any], *, is_megatron: bool) -> None:
    prefix = "policy.megatron_cfg.peft" if is_megatron else "policy.dtensor_cfg.lora_cfg"
    if not source.take(f"{prefix}.enabled"):
        return
    values["lora.rank"] = int(source.take(f"{prefix}.dim", 8))
    values["lora.alpha"] = float(source.take(f"{prefix}.alpha", 32))
    values["lora.dropout"] = float(source.take(f"{prefix}.dropout", 0.0))
    targets = [str(name).strip("*") for name in source.take(f"{prefix}.target_modules") or ()]
    if not is_megatron and source.take("policy.dtensor_cfg.lora_cfg.match_all_linear", False):
        targets = []
    values["lora.targets"] = targets or ["all-linear"]
    if is_megatron and targets:
        source.report(
            f"{prefix}.target_modules", "targets are named as in PEFT, such as q_proj, and these are Megatron's names"
        )
        values["lora.targets"] = ["all-linear"]


def import_cluster(source: Source, values: dict[str, Any], *, generates: bool) -> None:
    """Machines, and which of their GPUs generate."""
    nodes, gpus = int(source.take("cluster.num_nodes", 1)), int(source.take("cluster.gpus_per_node", 1))
    is_shared = source.take("policy.generation.colocated.enabled", True)
    of_node = source.take("policy.generation.colocated.resources.gpus_per_node")
    of_nodes = source.take("policy.generation.colocated.resources.num_nodes")
    values["run.device"] = "cuda"
    values |= {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus}
    if nodes > 1:
        values["cluster.address"] = "auto"  # there, too, Ray runs on every machine before the run begins
    if not generates or is_shared:
        return
    wanted = int(of_node or gpus) if nodes == 1 else round(gpus * int(of_nodes or 1) / nodes)
    values["cluster.placement"] = "separate"
    values["cluster.generator_gpus_per_node"] = _generating(values, nodes, gpus, wanted)
    if nodes > 1 and of_nodes:
        source.report(
            "policy.generation.colocated.resources.num_nodes",
            f"{values['cluster.generator_gpus_per_node']} GPUs of each machine generate, not whole machines",
            changes_meaning=False,
        )
    replicas, left = divmod(values["cluster.generator_gpus_per_node"], values["generator.vllm.tensor_parallel"])
    if left or not replicas:
        source.report(
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"an engine lies on one machine's {values['cluster.generator_gpus_per_node']} GPUs that generate: 1 is taken",
            changes_meaning=False,
        )
        values["generator.vllm.tensor_parallel"], replicas = 1, values["cluster.generator_gpus_per_node"]
    values["generator.vllm.replicas"] = replicas


def _generating(values: Mapping[str, Any], nodes: int, gpus: int, wanted: int) -> int:
    """The number of each machine's GPUs that generate, the nearest to what is wanted with which the others bear the layout."""
    sizes = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    tensor, context, pipeline, expert, expert_tensor = (
        next((int(value) for key, value in values.items() if key.startswith("trainer.") and key.endswith(f".{size}")), 1)
        for size in sizes
    )

    def bears(number: int) -> bool:
        ranks = nodes * (gpus - number)
        return ranks % (tensor * context * pipeline) == 0 and ranks % (expert * expert_tensor * pipeline) == 0

    numbers = sorted(range(1, gpus), key=lambda number: (not bears(number), abs(number - wanted)))
    return numbers[0] if numbers else 1
