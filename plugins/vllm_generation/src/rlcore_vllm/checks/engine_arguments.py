"""`[generator.vllm.engine]` against vLLM's own EngineArgs, read from its source, since importing it takes seconds."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from attrs import frozen

from rlcore.schema.suggestions import nearest
from rlcore.spi import Problem

TABLE = "generator.vllm.engine"

OWNED: dict[str, str] = {
    "model": "Set model.path.",
    "tokenizer": "The tokenizer is that of model.path.",
    "revision": "Set model.revision.",
    "tokenizer_revision": "Set model.revision.",
    "trust_remote_code": "Set model.trust_remote_code.",
    "dtype": "Set model.dtype.",
    "seed": "Set run.seed.",
    "max_model_len": "Set rollout.max_prompt_tokens and rollout.max_response_tokens; it is their sum.",
    "tensor_parallel_size": "Set generator.vllm.tensor_parallel.",
    "data_parallel_size": "Set generator.vllm.replicas.",
    "pipeline_parallel_size": "Set generator.vllm.tensor_parallel, the way to spread an engine over devices.",
    "distributed_executor_backend": "Leave it out: it follows from generator.vllm.tensor_parallel.",
    "kv_cache_memory_bytes": "Set generator.vllm.cpu_kv_cache_gib on CPU, generator.vllm.gpu_memory_utilization on CUDA.",
    "device_ids": "Set generator.vllm.devices.",
    "gpu_memory_utilization": "Set generator.vllm.gpu_memory_utilization.",
    "max_num_seqs": "Set generator.vllm.max_num_seqs.",
    "max_num_batched_tokens": "Set generator.vllm.max_num_batched_tokens.",
    "enforce_eager": "Set generator.vllm.enforce_eager.",
    "enable_prefix_caching": "Set generator.vllm.prefix_caching.",
    "quantization": "Set generator.vllm.quantization.",
    "quantization_config": "Set generator.vllm.quantization.",
    "kv_cache_dtype": "Set generator.vllm.kv_cache_dtype.",
    "calculate_kv_scales": "Leave it out: vLLM calculates scales once, and refits change the weights that they were for.",
    "speculative_config": "Set generator.vllm.speculative_ngram, speculative_model or speculative_method.",
    "disable_log_stats": "Set generator.vllm.metrics.",
    "served_model_name": "Pass --name to `rlcore serve`.",
    "logprobs_mode": "Leave it out: training needs the log-probabilities of the distribution sampled from.",
    "max_logprobs": "Leave it out: training needs the sampled tokens' alone.",
    "load_format": "Leave it out: the trainer sends the weights.",
    "config_format": "Leave it out: config.json says what the model is.",
    "skip_tokenizer_init": "Leave it out.",
    "generation_config": "Leave it out: [rollout] and [evaluation] say how to sample.",
    "override_generation_config": "Leave it out: [rollout] and [evaluation] say how to sample.",
    "enable_sleep_mode": "Leave it out: it is on where trainer and generator share a device.",
    "worker_extension_cls": "Leave it out: it receives the weights.",
    "enable_return_routed_experts": "Set rollout.replay_routing.",
    "aux_output_config": "Set rollout.replay_routing.",
    "enable_lora": "Leave it out: [lora] and refit.adapters say which adapters there are.",
    "max_loras": "Leave it out: all requests have the same adapters.",
    "max_lora_rank": "Set lora.rank.",
    "lora_target_modules": "Set lora.targets.",
    "weight_transfer_config": "Leave it out: [refit] says how weights travel.",
}
"""Arguments that follow from other keys of the recipe, each with what to do instead."""

_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}


@frozen(kw_only=True)
class Argument:
    """One field of vLLM's EngineArgs."""

    name: str
    annotation: str
    types: tuple[type, ...] | None
    """The types that a TOML value may have; None where the annotation names more than plain types."""

    def accepts(self, value: object) -> bool:
        """Return whether a TOML value can be meant. A truth value is no number."""
        if self.types is None:
            return True
        if isinstance(value, bool):
            return bool in self.types
        return isinstance(value, self.types)


def table_problems(table: Mapping[str, object]) -> Iterator[Problem]:
    """Keys that EngineArgs does not know or that are not for the table to set, and values of a wrong type."""
    if not table:
        return
    arguments = engine_arguments()
    for key, value in table.items():
        path = f"{TABLE}.{key}"
        argument = arguments.get(key)
        if key in OWNED:
            yield Problem(
                path=path, found="an argument that rlcore sets itself", expected="another argument of vLLM", remedy=OWNED[key]
            )
        elif argument is None and arguments:
            yield Problem(
                path=path, found="an unknown key", expected="an argument of vLLM's EngineArgs", remedy=_hint(key, arguments)
            )
        elif argument is not None and not argument.accepts(value):
            found = f"{value!r} ({type(value).__name__})"
            yield Problem(path=path, found=found, expected=f"{argument.annotation}, as vLLM's EngineArgs has it")
        elif key == "hf_overrides" and not isinstance(value, Mapping):
            yield Problem(path=path, found=f"{value!r} ({type(value).__name__})", expected="a table of keys of config.json")


@cache
def engine_arguments() -> dict[str, Argument]:
    """The fields of the installed vLLM's EngineArgs by name; empty where there is no vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return {argument.name: argument for argument in _fields(node)}
    return {}


def _fields(cls: ast.ClassDef) -> Iterator[Argument]:
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield Argument(name=node.target.id, annotation=ast.unparse(node.annotation), types=_plain_types(node.annotation))


def _plain_types(annotation: ast.expr) -> tuple[type, ...] | None:
    """The types of a union of plain ones; None for every other annotation."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _plain_types(annotation.left), _plain_types(annotation.right)
        return None if left is None or right is None else left + right
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return ()
    return _TYPES.get(annotation.id) if isinstance(annotation, ast.Name) else None


def _hint(key: str, arguments: Mapping[str, Argument]) -> str:
    near = nearest(key, arguments)
    return f"Did you mean {near}?" if near else "`vllm serve --help=all` lists them, with dashes for underscores."
