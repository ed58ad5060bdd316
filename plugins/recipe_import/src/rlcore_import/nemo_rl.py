"""`rlcore import nemo-rl`: GRPO, SFT and DPO of NeMo-RL's YAML."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.spi.importing import ImportedRecipe
from rlcore_import.nemo_rl_data import import_data
from rlcore_import.nemo_rl_keys import DROPPED, MAPPED
from rlcore_import.nemo_rl_policy import import_cluster, import_policy
from rlcore_import.references import resolved
from rlcore_import.source import Source
from rlcore_import.yaml_files import error, read_inherited, with_overrides

KINDS = ("grpo", "sft", "dpo")


def import_recipe(path: Path, overrides: Sequence[str] = ()) -> ImportedRecipe:
    """The recipe that a file of NeMo-RL's says, with what it inherits and KEY=VALUE behind it."""
    tables = resolved(with_overrides(read_inherited(path), overrides))
    kind = next((kind for kind in KINDS if isinstance(tables.get(kind), Mapping)), None)
    if kind is None or not isinstance(tables.get("policy"), Mapping):
        expected = f"a recipe of NeMo-RL's with policy and one of {', '.join(KINDS)}"
        raise error(path, f"the tables {', '.join(map(str, tables)) or 'none'}", expected)
    source = Source(values=tables, mapped=MAPPED, dropped=DROPPED)
    values: dict[str, Any] = {"algorithm.name": kind}
    with source.checked():
        _run(source, values, kind)
        import_policy(source, values, kind)
        import_data(source, values, kind, path)
        if kind == "grpo":
            _step(source, values)
            _advantages(source, values)
            _loss(source, values)
            _generation(source, values)
            _asynchrony(source, values)
        elif kind == "dpo":
            _preferences(source, values)
        import_cluster(source, values, generates=kind == "grpo")
    if "data.evaluation.source" not in values:
        values = {key: value for key, value in values.items() if not key.startswith("evaluation.")}
    return source.recipe(values)


def _run(source: Source, values: dict[str, Any], kind: str) -> None:
    values["run.num_steps"] = int(source.take(f"{kind}.max_num_steps", 100))
    values["run.seed"] = int(source.take(f"{kind}.seed", 42))
    every = int(source.take(f"{kind}.val_period", 0) or 0)
    values["evaluation.every_n_steps"] = max(every, 0)
    values["evaluation.at_start"] = bool(source.take(f"{kind}.val_at_start", False))
    values["evaluation.at_end"] = bool(source.take(f"{kind}.val_at_end", False))
    if kind == "grpo":
        if most := source.take("grpo.max_val_samples"):
            values["evaluation.max_prompts"] = int(most)
        values["evaluation.samples_per_prompt"] = int(source.take("grpo.val_num_generations_per_prompt", 1))
    saves = bool(source.take("checkpointing.enabled", True))
    values["checkpoint.at_end"] = saves
    values["checkpoint.every_n_steps"] = int(source.take("checkpointing.save_period", 0) or 0) if saves else 0
    if keep := source.take("checkpointing.keep_top_k"):
        values["checkpoint.keep"] = int(keep)
    if directory := source.take("checkpointing.checkpoint_dir"):
        folder = Path(str(directory))
        values["run.directory"] = str(folder.parent)
        values["run.name"] = folder.name or "run"
    if source.take("logger.tensorboard_enabled"):
        values["sinks.names"] = ["tensorboard"]
    if kind != "grpo":
        values["training.prompts_per_step"] = int(source.take("policy.train_global_batch_size", 32))


def _step(source: Source, values: dict[str, Any]) -> None:
    """Prompts, generations and updates of a step."""
    prompts, samples = (
        int(source.take("grpo.num_prompts_per_step", 32)),
        int(source.take("grpo.num_generations_per_prompt", 16)),
    )
    batch = int(source.take("policy.train_global_batch_size", prompts * samples))
    updates = max(1, prompts * samples // batch)
    if prompts * samples % batch or updates > prompts:
        updates = min(updates, prompts)
        source.report(
            "policy.train_global_batch_size",
            f"{prompts} prompts x {samples} samples are not whole batches of it: {updates} update(s) of whole groups here",
        )
    values["training.prompts_per_step"] = prompts
    values["training.updates_per_step"] = updates
    values["rollout.samples_per_prompt"] = samples
    values["rollout.max_turns"] = int(source.take("grpo.max_rollout_turns", 1))
    if source.take("grpo.overlong_filtering"):
        values["rollout.on_truncation"] = "mask"
    refills = bool(source.take("grpo.use_dynamic_sampling", False))
    most = float(source.take("grpo.dynamic_sampling_max_gen_batches", 10))
    values["rollout.refill_equal_rewards"] = refills
    if refills:
        values["rollout.max_refill_ratio"] = max(most - 1, 0.1)


def _advantages(source: Source, values: dict[str, Any]) -> None:
    name = str(source.take("grpo.adv_estimator.name", "grpo"))
    normalises = source.take("grpo.adv_estimator.normalize_rewards", source.take("grpo.normalize_rewards", True))
    leaves_out = source.take(
        "grpo.adv_estimator.use_leave_one_out_baseline", source.take("grpo.use_leave_one_out_baseline", True)
    )
    minus_baseline = source.take("grpo.adv_estimator.minus_baseline", True)
    baseline = "leave_one_out" if leaves_out else "group_mean"
    normalisation = ("leave_one_out_std" if leaves_out else "std") if normalises else "none"
    if name == "reinforce_plus_plus":
        baseline = "group_mean" if minus_baseline else "none"
        normalisation = "batch_whitening"
    elif name == "gdpo":
        values["algorithm.grpo.reward_aggregation"] = "normalise_then_sum"
    elif name != "grpo":
        source.report("grpo.adv_estimator.name", "no such estimator of advantages: that of GRPO is taken")
    values["algorithm.grpo.advantage_baseline"] = baseline
    values["algorithm.grpo.advantage_normalisation"] = normalisation
    if source.take("grpo.reward_shaping.enabled"):
        longest = float(source.take("grpo.reward_shaping.max_response_length", values["rollout.max_response_tokens"]))
        buffer = float(source.take("grpo.reward_shaping.overlong_buffer_length", 128))
        values["algorithm.grpo.length_penalty"] = "soft_overlong"
        values["algorithm.grpo.length_penalty_buffer"] = min(1.0, buffer / longest)
        penalty = float(source.take("grpo.reward_shaping.overlong_buffer_penalty", 1.0))
        if penalty > 0:
            values["algorithm.grpo.length_penalty_weight"] = penalty
        else:
            del values["algorithm.grpo.length_penalty"], values["algorithm.grpo.length_penalty_buffer"]
        if longest != values["rollout.max_response_tokens"]:
            source.report(
                "grpo.reward_shaping.max_response_length", "the penalty is over the end of rollout.max_response_tokens"
            )


def _loss(source: Source, values: dict[str, Any]) -> None:
    section = "algorithm.grpo"
    values[f"{section}.previous_logprobs"] = "trainer"
    values[f"{section}.loss_normalisation"] = "token" if source.take("loss_fn.token_level_loss", True) else "sequence"
    values[f"{section}.clip_low"] = float(source.take("loss_fn.ratio_clip_min", 0.2))
    values[f"{section}.clip_high"] = float(source.take("loss_fn.ratio_clip_max", 0.2))
    if dual := source.take("loss_fn.ratio_clip_c"):
        values[f"{section}.dual_clip"] = float(dual)
    if source.take("loss_fn.sequence_level_importance_ratios"):
        values[f"{section}.ratio"] = "sequence"
    if source.take("loss_fn.use_cispo"):
        values[f"{section}.objective"] = "cispo"
    if source.take("loss_fn.disable_ppo_ratio"):
        values[f"{section}.objective"] = "policy_gradient"
        values.pop(f"{section}.dual_clip", None)
    if source.take("loss_fn.force_on_policy_ratio") and values["training.updates_per_step"] > 1:
        source.report("loss_fn.force_on_policy_ratio", "ratios of later updates are those to the start of the step")
    _divergence(source, values, section)
    _importance(source, values, section)


def _divergence(source: Source, values: dict[str, Any], section: str) -> None:
    coefficient = float(source.take("loss_fn.reference_policy_kl_penalty", 0.0))
    kind = str(source.take("loss_fn.reference_policy_kl_type", "k3"))
    weighs, in_reward = source.take("loss_fn.use_on_policy_kl_approximation"), source.take("loss_fn.use_kl_in_reward")
    values[f"{section}.kl_coefficient"] = coefficient
    if not coefficient:
        return
    values[f"{section}.kl_estimator"] = kind
    if in_reward:
        values[f"{section}.kl_placement"] = "reward_to_go"
        return
    values[f"{section}.kl_gradient"] = "estimate"
    if weighs:
        values[f"{section}.kl_importance"] = "generation"


def _importance(source: Source, values: dict[str, Any], section: str) -> None:
    """The weights that correct for the generator's other numerics."""
    corrects = source.take("loss_fn.use_importance_sampling_correction", False)
    kind = source.take("loss_fn.truncated_importance_sampling_type")
    most = source.take("loss_fn.truncated_importance_sampling_ratio")
    least = source.take("loss_fn.truncated_importance_sampling_ratio_min", 0.0)
    if not corrects:
        values[f"{section}.importance_correction"] = "none"
        return
    is_sequence = values.get(f"{section}.ratio") == "sequence"
    values[f"{section}.importance_correction"] = "sequence" if is_sequence else "token"
    bound = math.inf if most is None else float(most)
    if kind == "seq-mask-tis":
        values |= {f"{section}.importance_maximum": math.inf, f"{section}.geometric_maximum": bound}
        values[f"{section}.geometric_minimum"] = float(least)
        return
    values[f"{section}.importance_maximum"] = bound
    values[f"{section}.importance_minimum"] = float(least)
    values[f"{section}.importance_bound"] = "mask" if kind == "icepop" else "truncate"
    if kind not in (None, "tis", "icepop"):
        source.report("loss_fn.truncated_importance_sampling_type", "no such bound: weights are truncated")


def _generation(source: Source, values: dict[str, Any]) -> None:
    prefix = "policy.generation"
    for theirs, ours, default in (("temperature", "temperature", 1.0), ("top_p", "top_p", 1.0), ("top_k", "top_k", 0)):
        value = source.take(f"{prefix}.{theirs}", default)
        values[f"rollout.{ours}"] = max(0, int(value)) if ours == "top_k" else float(value)
        value = source.take(f"{prefix}.val_{theirs}", value)
        if ours == "temperature" or values["evaluation.temperature"]:  # what is greedy is cut by nothing
            values[f"evaluation.{ours}"] = max(0, int(value)) if ours == "top_k" else float(value)
    if stops := source.take(f"{prefix}.stop_strings"):
        values["rollout.stop_strings"] = list(stops)
    if tokens := source.take(f"{prefix}.stop_token_ids"):
        values["rollout.stop_token_ids"] = list(tokens)
    backend = str(source.take(f"{prefix}.backend", "vllm"))
    if backend != "vllm":
        source.report(f"{prefix}.backend", "samples come from vLLM, whose numerics are others", changes_meaning=False)
    values["generator.name"] = "vllm"
    vllm = f"{prefix}.vllm_cfg"
    ranks, gpus = int(source.take(f"{vllm}.tensor_parallel_size", 1)), int(source.take("cluster.gpus_per_node", 1))
    if ranks > gpus:
        why = f"an engine lies on one machine, and has {gpus} ranks"
        source.report(f"{vllm}.tensor_parallel_size", why, changes_meaning=False)
    values["generator.vllm.tensor_parallel"] = min(ranks, gpus)
    _truncation(source, values, prefix)
    values["generator.vllm.gpu_memory_utilization"] = float(source.take(f"{vllm}.gpu_memory_utilization", 0.5))
    if source.take(f"{vllm}.enforce_eager"):
        values["generator.vllm.enforce_eager"] = True
    if source.take(f"{vllm}.enable_prefix_caching") is False:
        values["generator.vllm.prefix_caching"] = False
    if str(source.take(f"{vllm}.kv_cache_dtype", "auto")).startswith("fp8"):
        values["generator.vllm.kv_cache_dtype"] = "fp8"
    if str(source.take(f"{vllm}.precision", "")) == "fp8":
        values["generator.vllm.quantization"] = "fp8_per_block"
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if found := source.take(f"{prefix}.vllm_kwargs.{key}"):
            values[f"generator.vllm.{key}"] = int(found)
    if source.take("policy.router_replay.enabled"):
        values["rollout.replay_routing"] = True


def _truncation(source: Source, values: dict[str, Any], prefix: str) -> None:
    """What becomes of sampling from a part of the distribution, which NeMo-RL's trainer filters by the same bounds."""
    key = f"{prefix}.top_p" if values["rollout.top_p"] < 1 else f"{prefix}.top_k"
    if values["rollout.top_p"] >= 1 and values["rollout.top_k"] == 0:
        return
    if values["generator.vllm.tensor_parallel"] == 1:
        source.report(key, "the trainer normalises over the tokens that the generator kept, and filters nothing itself")
        return
    values["rollout.accept_truncation_bias"] = True
    source.report(key, "the trainer normalises over all tokens, since an engine of several ranks does not say which it kept")


def _asynchrony(source: Source, values: dict[str, Any]) -> None:
    is_async = bool(source.take("grpo.async_grpo.enabled", False))
    age = int(source.take("grpo.async_grpo.max_trajectory_age_steps", 1))
    in_flight = bool(source.take("grpo.async_grpo.in_flight_weight_updates", False))
    values["async.max_staleness"] = age if is_async else 0
    if is_async and not in_flight:
        source.report(
            "grpo.async_grpo.in_flight_weight_updates",
            "samples that are not finished go on with the new weights, where there they end with the old ones",
        )


def _preferences(source: Source, values: dict[str, Any]) -> None:
    values["algorithm.dpo.beta"] = float(source.take("dpo.reference_policy_kl_penalty", 0.05))
    values["algorithm.dpo.length_normalised"] = bool(source.take("dpo.preference_average_log_probs", False))
    values["algorithm.dpo.sft_coefficient"] = float(source.take("dpo.sft_loss_weight", 0.0))
    loss = str(source.take("dpo.preference_loss", "dpo"))
    if loss == "ipo":
        values["algorithm.dpo.loss"] = "ipo"
    elif loss != "dpo":
        source.report("dpo.preference_loss", "no such loss of pairs: DPO's is taken")
    if (weight := float(source.take("dpo.preference_loss_weight", 1))) != 1:
        source.report("dpo.preference_loss_weight", f"the loss of pairs counts 1; divide dpo.sft_loss_weight by {weight:g}")
