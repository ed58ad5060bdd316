"""Imports sampling, the generator and asynchrony of NeMo-RL's recipes."""

from typing import Any

from rlcore_import.source import Source

GEN = "policy.generation"
ENGINES = {"megatron": "mcore_generation_config", "sglang": "sglang_cfg", "trtllm": "trtllm_cfg", "dynamo": "dynamo_cfg"}
"""The table of options of each engine but vLLM."""
STRICT = "in_order"
"""NeMo-RL's sampler that trains each step on the samples requested for it."""


def import_generation(source: Source, values: dict[str, Any]) -> None:
    """Import the sampling of training and evaluation, and vLLM's options."""
    _sampling(source, values)
    for theirs, ours in (("stop_strings", "stop_strings"), ("stop_token_ids", "stop_token_ids")):
        found = source.take(f"{GEN}.{theirs}")
        if isinstance(found, list) and found:
            values[f"rollout.{ours}"] = found
        elif found:
            source.refuse(f"{GEN}.{theirs}", "a list")
    backend = source.text(f"{GEN}.backend", "vllm")
    source.ignore(*(f"{GEN}.{table}" for name, table in ENGINES.items() if name != backend))
    if backend != "trtllm":
        source.ignore(f"{GEN}.trtllm_kwargs")
    if backend not in ("vllm", "dynamo"):
        source.report(f"{GEN}.backend", "samples come from vLLM, whose numerics are others", changes_meaning=False)
    values["generator.name"] = "vllm"
    vllm, section = f"{GEN}.vllm_cfg", "generator.vllm"
    ranks, gpus = (
        source.integer(f"{vllm}.tensor_parallel_size", 1, least=1),
        source.integer("cluster.gpus_per_node", 1, least=1),
    )
    if ranks > gpus:
        why = f"an engine lies on one machine, and has {gpus} ranks"
        source.report(f"{vllm}.tensor_parallel_size", why, changes_meaning=False)
    values[f"{section}.tensor_parallel"] = min(ranks, gpus)
    _truncation(source, values)
    share = source.number(f"{vllm}.gpu_memory_utilization", 0.5, least=0)
    if not 0 < share <= 1:
        source.refuse(f"{vllm}.gpu_memory_utilization", "a number above 0 and at most 1")
    values[f"{section}.gpu_memory_utilization"] = share
    if source.flag(f"{vllm}.enforce_eager"):
        values[f"{section}.enforce_eager"] = True
    if not source.flag(f"{vllm}.enable_prefix_caching", True):
        values[f"{section}.prefix_caching"] = False
    trained = source.text("policy.precision", values["model.dtype"])
    cache, precision = source.text(f"{vllm}.kv_cache_dtype", "auto"), source.text(f"{vllm}.precision", trained)
    if cache.startswith("fp8"):
        values[f"{section}.kv_cache_dtype"] = "fp8"
    elif cache not in ("auto", values["model.dtype"]):
        source.report(f"{vllm}.kv_cache_dtype", "keys and values are kept in model.dtype")
    if precision == "fp8":
        values[f"{section}.quantization"] = "fp8_per_block"
    elif precision not in (trained, "auto", values["model.dtype"]):
        source.report(f"{vllm}.precision", "samples are generated in model.dtype")
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if found := source.integer(f"{GEN}.vllm_kwargs.{key}", least=1):
            values[f"{section}.{key}"] = found
    if source.flag("policy.router_replay.enabled"):
        values["rollout.replay_routing"] = True


def _sampling(source: Source, values: dict[str, Any]) -> None:
    """Import temperature, top_k and top_p. A greedy evaluation has no top_k and top_p."""
    warmth = source.number(f"{GEN}.temperature", 1.0, least=0)
    if not warmth:
        source.refuse(f"{GEN}.temperature", "a number above 0: samples are drawn")
    share, most = source.number(f"{GEN}.top_p", 1.0, least=0), source.integer(f"{GEN}.top_k", 0)
    values |= {"rollout.temperature": warmth, "rollout.top_p": share, "rollout.top_k": max(0, most)}
    values["evaluation.temperature"] = source.number(f"{GEN}.val_temperature", warmth, least=0)
    held_out = source.number(f"{GEN}.val_top_p", share, least=0), source.integer(f"{GEN}.val_top_k", most)
    if values["evaluation.temperature"]:
        values |= {"evaluation.top_p": held_out[0], "evaluation.top_k": max(0, held_out[1])}
    for key, found in ((f"{GEN}.top_p", share), (f"{GEN}.val_top_p", held_out[0])):
        if not 0 < found <= 1:
            source.refuse(key, "a number above 0 and at most 1")


def _truncation(source: Source, values: dict[str, Any]) -> None:
    """Import top_k and top_p of training, by which NeMo-RL's trainer also filters its log-probabilities."""
    key = f"{GEN}.top_p" if values["rollout.top_p"] < 1 else f"{GEN}.top_k"
    if values["rollout.top_p"] >= 1 and values["rollout.top_k"] == 0:
        return
    if values["generator.vllm.tensor_parallel"] == 1:
        source.report(key, "the trainer normalises over the tokens that the generator kept, and filters nothing itself")
        return
    values["rollout.accept_truncation_bias"] = True
    source.report(key, "the trainer normalises over all tokens, since an engine of several ranks does not say which it kept")


def import_asynchrony(source: Source, values: dict[str, Any]) -> None:
    """Import the staleness of samples from `async_rl`, or else from `grpo.async_grpo`."""
    is_async = source.flag("grpo.async_grpo.enabled")
    age = source.integer("grpo.async_grpo.max_trajectory_age_steps", 1, least=0)
    in_flight = source.flag("grpo.async_grpo.in_flight_weight_updates")
    values["async.max_staleness"] = age if is_async else 0
    if is_async and not in_flight:
        source.report(
            "grpo.async_grpo.in_flight_weight_updates",
            "samples that are not finished go on with the new weights, where there they end with the old ones",
        )
    if source.look("async_rl") is not None:
        _single_controller(source, values)
    corrects = values.get("algorithm.grpo.importance_correction") != "none"
    if values["async.max_staleness"] and not corrects:
        values["async.max_staleness"] = 0
        why = "each step samples with its own weights: [async] asks for loss_fn.use_importance_sampling_correction"
        source.report("grpo.async_grpo.enabled" if is_async else "async_rl.sampler.name", why)


def _single_controller(source: Source, values: dict[str, Any]) -> None:
    sampler = source.text("async_rl.sampler.name", STRICT)
    lookahead = source.integer("async_rl.sampler.max_lookahead_versions", 1, least=0)
    staleness = source.integer("async_rl.sampler.max_staleness_versions", 1, least=0)
    values["async.max_staleness"] = lookahead if sampler == STRICT else staleness
    if sampler != STRICT:
        source.report(
            "async_rl.sampler.name", "a step trains on the samples which were asked for it, not on those that are ready"
        )
