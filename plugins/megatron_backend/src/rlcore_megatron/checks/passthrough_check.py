"""Checks the recipe's tables for Megatron: keys, types, and values that Megatron accepts and then computes wrongly."""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from attrs import frozen

from rlcore.spi import Problem
from rlcore_megatron.checks.reserved_keys import RESERVED_KEYS
from rlcore_megatron.layouts.layout_check import SECTION, option_problem
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.passthrough import TABLES, megatron_class, table_problems
from rlcore_megatron.setup.requirements import transformer_engine_version, uses_transformer_engine
from rlcore_torchkit.architectures.dims import ModelDims

NEEDS_ENGINE = (
    "apply_rope_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_grouped_gemm",
    "use_te_activation_func",
    "use_te_rng_tracker",
    "attention_backend",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "fp4",
)
"""Fields of TransformerConfig that do nothing, or fail in the middle of a step, without layers of TransformerEngine."""
NEEDS_ITS_STATE = ("layernorm",)
"""Modules whose recomputation fails in the first step where TransformerEngine is not installed, whatever computes layers."""
NEEDS_FP8 = (
    "fp8_recipe",
    "fp8_margin",
    "fp8_interval",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
)
"""Fields of TransformerConfig that do nothing without products in float8."""
NEEDS_NARROW = (
    "tp_only_amax_red",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)
"""Fields that do nothing without products in float8 or in 4 bits."""
PRECISIONS = {
    "main_params_dtype": ("float32", "float16"),
    "exp_avg_dtype": ("float32", "bfloat16", "float16"),
    "exp_avg_sq_dtype": ("float32", "bfloat16", "float16"),
}
"""The dtypes of masters and moments in TransformerEngine's Adam. Its 8 bits are no plain tensors, which could move to the
host."""
NEEDS_PRECISION_AWARE = (*PRECISIONS, "store_param_remainders", "optimizer_cpu_offload")
"""Fields of OptimizerConfig that do nothing, or fail, without use_precision_aware_optimizer."""
NEEDS_OFFLOAD = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params")
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
RATE_COURSES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
ANNEALING_COURSES = ("linear", "cosine", "exponential", "minus_sqrt")
DECAY_COURSES = ("constant", "linear", "cosine")


def passthrough_problems(
    config: MegatronConfig, device: Literal["cpu", "cuda"], dtype: str, dims: ModelDims | None = None
) -> list[Problem]:
    """Return all problems of the four tables; `dims` are the model's, or None where they are not at hand yet.

    Imports Megatron where one of them says anything.
    """
    problems = []
    for name in TABLES:
        table: Mapping[str, Any] = getattr(config, name)
        if not table:
            continue
        cls, owned = megatron_class(name), RESERVED_KEYS[name]
        others = {key: value for key, value in table.items() if key not in owned}
        for key in table.keys() & owned.keys():
            expected = f"another field of Megatron's {cls.__name__}"
            problems.append(option_problem(f"{name}.{key}", "a field that is not for this table to set", expected, owned[key]))
        problems += sorted(table_problems(others, cls, f"{SECTION}.{name}"), key=lambda problem: problem.path)
    return problems or list(_combinations(_Setting(config=config, device=device, dtype=dtype), dims))


def _combinations(setting: "_Setting", dims: ModelDims | None) -> Iterator[Problem]:
    """Values that are right for themselves, and wrong here."""
    config = setting.config
    yield from _exchange_problems(setting, config.transformer)
    yield from _engine_problems(setting, config.transformer, dims)
    yield from _recompute_problems(setting, config.transformer)
    yield from _routing_problems(setting, config.transformer, dims)
    yield from _optimizer_problems(setting, config.optimizer)
    yield from _scheduler_problems(config.scheduler)
    yield from _ddp_problems(setting, config.ddp)


@frozen(kw_only=True)
class _Setting:
    """The surroundings that combinations of options are judged by."""

    config: MegatronConfig
    device: Literal["cpu", "cuda"]
    dtype: str

    @property
    def fused(self) -> bool:
        """Return whether the model's layers are those of TransformerEngine."""
        return uses_transformer_engine(self.config, self.device, self.dtype)

    @property
    def has_stages(self) -> bool:
        """Return whether there can be several."""
        return self.config.pipeline_parallel != 1 and (self.config.pipeline_parallel != "auto" or self.device == "cuda")

    @property
    def is_interleaved(self) -> bool:
        return self.config.virtual_pipeline_parallel > 1


def _exchange_problems(setting: _Setting, table: Mapping[str, Any]) -> Iterator[Problem]:
    """Check how stages exchange what they have computed."""
    wrong = partial(_value_problem, "transformer", table)
    if table.get("calculate_per_token_loss") is False:
        remedy = "Losses are divided by the step's global counts already; Megatron would divide them again, by its own"
        yield wrong("calculate_per_token_loss", "true", remedy)
    if table.get("variable_seq_lengths") is False and setting.has_stages:
        yield wrong("variable_seq_lengths", "true with several stages: packed microbatches differ in length")
    if table.get("moe_token_dispatcher_type") == "allgather" and setting.has_stages:
        yield wrong("moe_token_dispatcher_type", '"alltoall" with several stages: "allgather" wants one length of microbatches')
    if table.get("moe_token_dispatcher_type") == "flex" and (setting.device == "cpu" or find_spec("deep_ep") is None):
        yield wrong("moe_token_dispatcher_type", '"alltoall", unless there are GPUs and DeepEP is installed')
    if setting.is_interleaved:
        if table.get("batch_p2p_comm"):
            remedy = "Megatron takes true with virtual stages and computes wrong gradients, without an error"
            yield wrong("batch_p2p_comm", "false with virtual_pipeline_parallel above 1", remedy)
        if table.get("overlap_p2p_comm") is False:
            yield wrong("overlap_p2p_comm", "true with virtual_pipeline_parallel above 1, where exchange is not batched")
    elif table.get("overlap_p2p_comm"):
        yield wrong("overlap_p2p_comm", "false without virtual stages: Megatron overlaps nothing else")
    if table.get("deallocate_pipeline_outputs") and setting.device == "cpu":
        remedy = "Without CUDA's streams an output that is freed while it is sent arrives wrong"
        yield wrong("deallocate_pipeline_outputs", "false on cpu", remedy)


def _engine_problems(setting: _Setting, table: Mapping[str, Any], dims: ModelDims | None) -> Iterator[Problem]:
    """Check options that need layers of TransformerEngine, and those that its layers lack."""
    wrong = partial(_value_problem, "transformer", table)
    if not setting.fused:
        for key in NEEDS_ENGINE:
            if table.get(key):
                yield wrong(key, "layers of TransformerEngine, for this", "Leave it out")
        if table.get("gradient_accumulation_fusion") and find_spec("fused_weight_gradient_mlp_cuda") is None:
            yield wrong("gradient_accumulation_fusion", "false without TransformerEngine and apex, whose kernels it needs")
    elif table.get("apply_rope_fusion") and dims is not None and dims.latent is not None:
        remedy = "The kernel for multi-latent attention knows positions of one sequence only"
        yield wrong("apply_rope_fusion", "false with multi-latent attention", remedy)
    if not setting.config.fp8:
        useless = NEEDS_FP8 if table.get("fp4") else (*NEEDS_FP8, *NEEDS_NARROW)
        for key in (key for key in useless if key in table):
            yield wrong(key, "no such field without fp8", f"Set {SECTION}.fp8 to true, or leave it out")


def _recompute_problems(setting: _Setting, table: Mapping[str, Any]) -> Iterator[Problem]:
    """Details of a way to recompute that is not the one chosen, which Megatron ignores; modules that it cannot recompute."""
    for key, mode in (("recompute_modules", "selective"), ("recompute_method", "full"), ("recompute_num_layers", "full")):
        if key in table and setting.config.recompute != mode:
            found = f'{table[key]!r} with recompute = "{setting.config.recompute}"'
            yield option_problem(f"transformer.{key}", found, f'{SECTION}.recompute = "{mode}"', "Set that, or leave it out")
    discarded = [name for name in _listed(table.get("recompute_modules")) if name in NEEDS_ITS_STATE]
    if discarded and transformer_engine_version() is None:
        expected = f"none of {', '.join(NEEDS_ITS_STATE)}, whose recomputation asks TransformerEngine for its state"
        yield _value_problem("transformer", table, "recompute_modules", expected, "Install that, or leave them out")


def _routing_problems(setting: _Setting, table: Mapping[str, Any], dims: ModelDims | None) -> Iterator[Problem]:
    """Return problems of options of mixture-of-experts layers."""
    if dims is not None and not dims.num_experts:
        for key in sorted(table):
            if key.startswith("moe_"):
                yield _value_problem("transformer", table, key, "no such field for a model without experts", "Leave it out")
        return
    yield from _balancing_problems(table)
    weighted = any(weight > 0 for weight in _listed(table.get("moe_aux_loss_coeff")))
    if "moe" in _listed(table.get("recompute_modules")) and setting.has_stages and (weighted or table.get("moe_z_loss_coeff")):
        expected = "other modules, with several stages and a loss of routers"
        remedy = f'A router would take the tokens of a later microbatch for its own. Or set {SECTION}.recompute to "full"'
        yield _value_problem("transformer", table, "recompute_modules", expected, remedy)


def _balancing_problems(table: Mapping[str, Any]) -> Iterator[Problem]:
    """Kinds of losses that balance experts, and their coefficients."""
    wrong, keys = partial(_value_problem, "transformer", table), ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    kinds, weights = (_listed(table.get(key)) for key in keys)
    for kind in kinds:
        if kind not in BALANCING:
            expected = f"among {', '.join(BALANCING)}, which leave the routing itself as it is in generation"
            yield option_problem(f"transformer.{keys[0]}", repr(kind), expected)
    if len(set(kinds)) < len(kinds):
        yield wrong(keys[0], "each of them once")
    balanced, weighted = any(kind != "none" for kind in kinds), any(weight > 0 for weight in weights)
    listed = {isinstance(table.get(key), list | tuple) for key in keys}
    if kinds and weights and (len(kinds) != len(weights) or len(listed) > 1):
        yield wrong(keys[1], f"a number for each of {keys[0]}: a list where that is one, and as long")
    elif weighted != balanced:
        found, missing = reversed(keys) if weighted else keys
        yield wrong(found, f"{missing} beside it", "One without the other balances nothing")


def _optimizer_problems(setting: _Setting, table: Mapping[str, Any]) -> Iterator[Problem]:
    wrong = partial(_value_problem, "optimizer", table)
    for key in ("decoupled_lr", "decoupled_min_lr"):
        if key in table and not setting.config.scheduler:
            remedy = f"[schedule] sets one rate for all parameters; a table {SECTION}.scheduler can set two"
            yield wrong(key, f"{SECTION}.scheduler beside it", remedy)
    aware, offloads = table.get("use_precision_aware_optimizer", False), table.get("optimizer_cpu_offload", False)
    if aware and (setting.device == "cpu" or transformer_engine_version() is None):
        yield wrong("use_precision_aware_optimizer", "false without a GPU and TransformerEngine, whose Adam it is")
    elif aware and setting.dtype != "bfloat16":
        remedy = "float32 weights are their own masters"
        yield wrong("use_precision_aware_optimizer", f'false with model.dtype = "{setting.dtype}"', remedy)
    for key in NEEDS_PRECISION_AWARE:
        if key in table and table[key] is not False and not aware:
            yield wrong(key, "use_precision_aware_optimizer = true beside it", "Megatron ignores it without, or fails")
    for key, known in PRECISIONS.items():
        if key in table and table[key] not in known:
            yield wrong(key, f"one of {', '.join(known)}")
        elif key in table and offloads:
            yield wrong(key, "no such field with optimizer_cpu_offload", "The optimizer of the host is float32 throughout")
    if table.get("store_param_remainders") and (offloads or table.get("main_params_dtype", "float32") != "float32"):
        yield wrong("store_param_remainders", "false, or left out, unless masters are float32 and on the device")
    for key in NEEDS_OFFLOAD:
        if key in table and not offloads:
            yield wrong(key, "optimizer_cpu_offload = true beside it", "Megatron ignores it without")
    if offloads and not 0.0 < table.get("optimizer_offload_fraction", 0.0) <= 1.0:
        found = table.get("optimizer_offload_fraction", "nothing")
        expected = "above 0.0 and at most 1.0 with optimizer_cpu_offload: the share of the parameters"
        yield option_problem("optimizer.optimizer_offload_fraction", str(found), expected, "1.0 keeps nothing on the device")


def _scheduler_problems(table: Mapping[str, Any]) -> Iterator[Problem]:
    """Megatron's scheduler has no messages for these, and meets some of them in the middle of a run only."""
    wrong = partial(_value_problem, "scheduler", table)
    courses = {"lr_decay_style": RATE_COURSES, "lr_wsd_decay_style": ANNEALING_COURSES, "wd_incr_style": DECAY_COURSES}
    for key, known in courses.items():
        if key in table and table[key] not in known:
            yield wrong(key, f"one of {', '.join(known)}")
    if table.get("lr_decay_style") == "WSD":
        missing = [key for key in ("wsd_decay_steps", "lr_wsd_decay_style") if key not in table]
        if missing:
            yield wrong("lr_decay_style", f"{' and '.join(missing)} beside it")
    for key, least in (("min_lr", 0), ("init_lr", 0), ("start_wd", 0), ("lr_decay_steps", 1), ("wd_incr_steps", 1)):
        if key in table and table[key] < least:
            yield wrong(key, f"at least {least}")
    if "lr_warmup_steps" in table and table["lr_warmup_steps"] >= table.get("lr_decay_steps", float("inf")):
        yield wrong("lr_warmup_steps", f"less than lr_decay_steps = {table['lr_decay_steps']}")
    rises = {"start_wd", "end_wd"} & table.keys()
    if len(rises) == 1:
        yield wrong(*rises, expected="start_wd and end_wd together")
    elif rises and table["end_wd"] < table["start_wd"]:
        yield wrong("end_wd", f"at least start_wd = {table['start_wd']}")
    elif rises and table["end_wd"] != table["start_wd"] and table.get("wd_incr_style", "constant") == "constant":
        yield wrong("end_wd", 'wd_incr_style = "linear" or "cosine" beside it')


def _ddp_problems(setting: _Setting, table: Mapping[str, Any]) -> Iterator[Problem]:
    wrong = partial(_value_problem, "ddp", table)
    if table.get("average_in_collective"):
        remedy = "Losses are divided by the step's global counts, so gradients add up over ranks and are no means"
        yield wrong("average_in_collective", "false", remedy)
    if table.get("data_parallel_sharding_strategy", "no_shard") != "no_shard":
        remedy = "Others need use_megatron_fsdp; the trainer fsdp2 divides weights over data-parallel ranks"
        yield wrong("data_parallel_sharding_strategy", '"no_shard"', remedy)
    overlaps = table.get("overlap_grad_reduce", setting.device == "cuda")
    if table.get("overlap_param_gather") and not overlaps:
        yield wrong("overlap_param_gather", "overlap_grad_reduce = true beside it")
    if table.get("align_param_gather") and not table.get("overlap_param_gather"):
        yield wrong("align_param_gather", "overlap_param_gather = true beside it")


def _listed(value: Any) -> list[Any]:
    """A value or a list of them as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _value_problem(name: str, table: Mapping[str, Any], key: str, expected: str, remedy: str = "") -> Problem:
    return option_problem(f"{name}.{key}", repr(table[key]), expected, remedy)
