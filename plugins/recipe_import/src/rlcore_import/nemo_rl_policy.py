"""Imports the model, lengths, layout and cluster of NeMo-RL's recipes."""

from collections.abc import Mapping
from typing import Any

from rlcore_import.source import Source
from rlcore_import.yaml_files import MISSING

TEACHERS = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.num_nodes"
FSDP2 = "trainer.fsdp2"
LAYOUTS = {
    FSDP2: "policy.dtensor_cfg.tensor_parallel_size",
    "trainer.megatron": "policy.megatron_cfg.tensor_model_parallel_size",
}
"""The key that a problem with a trainer's layout names."""
BRADLEY_TERRY = "bradley_terry"
TEXTS_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The template with which NeMo-RL joins messages where the chat template is null."""
PROMPT_SHARE = 4
"""The longest sequence divided by the longest prompt, where a recipe bounds the sequence alone."""


def import_policy(source: Source, values: dict[str, Any], kind: str) -> None:
    """Import the keys of `policy` except those of the optimizer and the generator."""
    _model(source, values, kind)
    _lengths(source, values, kind)
    _microbatches(source, values)
    is_megatron = source.flag("policy.megatron_cfg.enabled")
    source.flag("policy.dtensor_cfg.enabled")
    if is_megatron:
        source.ignore("policy.dtensor_cfg")
        _megatron(source, values)
    else:
        source.ignore("policy.megatron_cfg")
        _fsdp2(source, values)
    _adapters(source, values, is_megatron=is_megatron)


def _model(source: Source, values: dict[str, Any], kind: str) -> None:
    path = source.text("policy.model_name", "")
    values["model.path"] = path
    if path in ("", MISSING):
        source.refuse("policy.model_name", "a model", "Name one behind the file: policy.model_name=…")
    if source.text("policy.tokenizer.name", path) != path:
        source.report("policy.tokenizer.name", "the tokenizer is the model's own")
    _template(source, values)
    precision = source.text("policy.precision", "bfloat16")
    values["model.dtype"] = precision if precision in ("float32", "bfloat16") else "bfloat16"
    if precision not in ("float32", "bfloat16"):
        source.report("policy.precision", "bfloat16 is taken: gradients in float16 would need a loss scale")
    for key in ("policy.pretrained_checkpoint", "checkpointing.pretrained_checkpoint"):
        if source.take(key):
            source.report(
                key, "weights are those of model.path; trainer.megatron.pretrained_checkpoint takes a directory of torch_dist"
            )
    if kind == "rm":
        source.flag("policy.reward_model_cfg.enabled")
        if source.text("policy.reward_model_cfg.reward_model_type", BRADLEY_TERRY) != BRADLEY_TERRY:
            source.refuse("policy.reward_model_cfg.reward_model_type", BRADLEY_TERRY)


def _template(source: Source, values: dict[str, Any]) -> None:
    """Import the chat template. Null joins the messages' texts; a missing key is the tokenizer's template."""
    key = "policy.tokenizer.chat_template"
    template = source.text(key)
    if template is None:
        if "chat_template" in (source.look("policy.tokenizer") or {}):
            values["model.chat_template"] = TEXTS_ALONE
    elif template.endswith(".jinja"):
        source.report(key, "model.chat_template is the text of the file: the tokenizer's own is taken")
    elif not template:
        source.refuse(key, "a template, null or default")
    elif template.lower() != "default":
        values["model.chat_template"] = template
    keywords = source.table("policy.tokenizer.chat_template_kwargs")
    values |= {f"model.chat_template_kwargs.{name}": value for name, value in keywords.items() if value is not None}


def _lengths(source: Source, values: dict[str, Any], kind: str) -> None:
    """Import lengths: NeMo-RL bounds prompt and answer together, rlcore each by itself."""
    total = source.integer("policy.max_total_sequence_length", 4096, least=2)
    if kind == "grpo":
        total = min(total, source.integer("policy.generation.vllm_cfg.max_model_len", total, least=2))
    prompt = min(total, source.integer("data.max_input_seq_length", total, least=1))
    answer = min(total, source.integer("policy.generation.max_new_tokens", total, least=1)) if kind == "grpo" else total
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
    total = source.integer("policy.max_total_sequence_length", 4096, least=1)
    tokens = total * source.integer("policy.train_micro_batch_size", 1, least=1)
    for name in ("dynamic_batching", "sequence_packing"):
        found = source.integer(f"policy.{name}.train_mb_tokens", least=1)
        if source.flag(f"policy.{name}.enabled") and found:
            tokens = found
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
        values[f"{section}.{ours}"] = source.integer(f"{prefix}.{theirs}", 1, least=1)
    if values[f"{section}.tensor_parallel"] > 1:
        values[f"{section}.sequence_parallel"] = source.flag(f"{prefix}.sequence_parallel")
    else:
        source.take(f"{prefix}.sequence_parallel")
    for key in ("cpu_offload", "activation_checkpointing"):
        values[f"{section}.{key}"] = source.flag(f"{prefix}.{key}")
    frozen = f"{prefix}.automodel_kwargs.freeze_config.freeze_vision_tower"
    if source.flag(frozen):
        values[f"{section}.freeze"] = "vision"
        source.report(frozen, "what projects the tower's output stays as it was too")


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
        values[f"{section}.{ours}"] = source.integer(f"{prefix}.{theirs}", 1, least=1)
    is_divided, has_experts = values[f"{section}.tensor_parallel"] > 1, values[f"{section}.expert_parallel"] > 1
    divides_tokens = source.flag(f"{prefix}.sequence_parallel")
    if is_divided and not has_experts:
        values[f"{section}.sequence_parallel"] = divides_tokens
    recomputes = source.flag(f"{prefix}.activation_checkpointing")
    granularity = source.text(f"{prefix}.recompute_granularity", "full")
    modules = source.take(f"{prefix}.recompute_modules")
    if recomputes:
        values[f"{section}.recompute"] = "selective" if granularity == "selective" else "full"
        if granularity == "selective" and modules:
            values[f"{section}.transformer.recompute_modules"] = list(modules)
    if router := source.text(f"{prefix}.moe_router_dtype"):
        values[f"{section}.transformer.moe_router_dtype"] = router
    if source.flag(f"{prefix}.fp8_cfg.enabled"):
        values[f"{section}.fp8"] = True
        values[f"{section}.transformer.fp8_recipe"] = source.text(f"{prefix}.fp8_cfg.fp8_recipe", "blockwise")
    reduces = f"{prefix}.distributed_data_parallel_config.grad_reduce_in_fp32"
    if source.look(reduces) is not None:
        values[f"{section}.ddp.grad_reduce_in_fp32"] = source.flag(reduces)


def _adapters(source: Source, values: dict[str, Any], *, is_megatron: bool) -> None:
    prefix = "policy.megatron_cfg.peft" if is_megatron else "policy.dtensor_cfg.lora_cfg"
    if not source.flag(f"{prefix}.enabled"):
        return
    values["lora.rank"] = source.integer(f"{prefix}.dim", 8, least=1)
    values["lora.alpha"] = source.number(f"{prefix}.alpha", 32.0, least=0)
    values["lora.dropout"] = source.number(f"{prefix}.dropout", 0.0, least=0)
    if source.text(f"{prefix}.dropout_position", "post") != "pre" and values["lora.dropout"]:
        source.report(f"{prefix}.dropout_position", "an adapter's inputs are dropped, not its outputs")
    start = f"{prefix}.lora_A_init_method" if is_megatron else f"{prefix}.lora_A_init"
    if source.text(start, "xavier") not in ("uniform", "kaiming"):
        source.report(start, "A begins uniform in 1 / the root of its inputs, as PEFT's does")
    targets = [str(name).strip("*") for name in source.take(f"{prefix}.target_modules") or ()]
    if not is_megatron and source.flag("policy.dtensor_cfg.lora_cfg.match_all_linear", True):
        targets = []
    values["lora.targets"] = targets or ["all-linear"]
    if is_megatron and targets:
        source.report(
            f"{prefix}.target_modules", "targets are named as in PEFT, such as q_proj, and these are Megatron's names"
        )
        values["lora.targets"] = ["all-linear"]


def check_layout(source: Source, values: Mapping[str, Any]) -> None:
    """Refuse sizes that do not divide the trainer's ranks."""
    ranks = values["cluster.nodes"] * (values["cluster.gpus_per_node"] - values.get("cluster.generator_gpus_per_node", 0))
    section = f"trainer.{values['trainer.name']}"
    tensor, context, replicate, stages, experts = (
        values.get(f"{section}.{size}", 1)
        for size in ("tensor_parallel", "context_parallel", "replicate", "pipeline_parallel", "expert_parallel")
    )
    product = tensor * context * replicate * stages
    if ranks % product:
        source.refuse(LAYOUTS[section], f"sizes whose product divides the trainer's {ranks} ranks; it is {product}")
    elif section == FSDP2 and ranks // (tensor * replicate) % experts:
        source.refuse("policy.dtensor_cfg.expert_parallel_size", f"a divisor of {ranks // (tensor * replicate)}")


def import_cluster(source: Source, values: dict[str, Any], kind: str) -> None:
    """Import the machines, and the number of their GPUs that generate."""
    nodes, gpus = source.integer("cluster.num_nodes", 1, least=1), source.integer("cluster.gpus_per_node", 1, least=1)
    is_shared = source.flag("policy.generation.colocated.enabled", True)
    of_node = source.integer("policy.generation.colocated.resources.gpus_per_node", least=1)
    of_nodes = source.integer("policy.generation.colocated.resources.num_nodes", least=1)
    values["run.device"] = "cuda"
    values |= {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus}
    if nodes > 1:
        values["cluster.address"] = "auto"  # there, too, Ray runs on every machine before the run begins
    if kind != "grpo" or is_shared:
        return
    generating = _generating(values, nodes, gpus, (of_node or gpus) if nodes == 1 else round(gpus * (of_nodes or 1) / nodes))
    key = f"policy.generation.colocated.resources.{'gpus_per_node' if nodes == 1 else 'num_nodes'}"
    if generating is None:
        others = (of_nodes or 0) + (source.integer(TEACHERS, 0) if values["algorithm.name"] == "distill" else 0)
        values["cluster.nodes"] = trains = max(1, nodes - others)
        if trains == 1:
            values.pop("cluster.address", None)
        why = f"trainer and generator take turns on {trains} machine(s): no share of each leaves the trainer's layout whole"
        source.report(key, why, changes_meaning=False)
        return
    values |= {"cluster.placement": "separate", "cluster.generator_gpus_per_node": generating}
    if nodes > 1 and of_nodes:
        source.report(key, f"{generating} GPUs of each machine generate, not whole machines", changes_meaning=False)
    replicas, left = divmod(generating, values["generator.vllm.tensor_parallel"])
    if left or not replicas:
        source.report(
            "policy.generation.vllm_cfg.tensor_parallel_size",
            f"an engine lies on one machine's {generating} GPUs that generate: 1 is taken",
            changes_meaning=False,
        )
        values["generator.vllm.tensor_parallel"], replicas = 1, generating
    values["generator.vllm.replicas"] = replicas


def _generating(values: Mapping[str, Any], nodes: int, gpus: int, wanted: int) -> int | None:
    """Return how many GPUs of each machine generate: the number nearest to `wanted` that leaves the trainer whole replicas.

    None where no number does.
    """
    sizes = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    tensor, context, pipeline, expert, expert_tensor = (
        next((int(value) for key, value in values.items() if key.startswith("trainer.") and key.endswith(f".{size}")), 1)
        for size in sizes
    )

    def bears(number: int) -> bool:
        ranks = nodes * (gpus - number)
        return ranks % (tensor * context * pipeline) == 0 and ranks % (expert * expert_tensor * pipeline) == 0

    numbers = sorted(filter(bears, range(1, gpus)), key=lambda number: abs(number - wanted))
    return numbers[0] if numbers else None
