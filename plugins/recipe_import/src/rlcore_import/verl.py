"""`rlcore import verl`: PPO, GRPO and their kin of verl's hydra configuration and the arguments behind it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.spi.importing import ImportedRecipe
from rlcore_import.references import resolved
from rlcore_import.source import Source
from rlcore_import.verl_keys import ACTOR, DROPPED, MAPPED, ROLLOUT
from rlcore_import.yaml_files import error, read_hydra, with_overrides

ESTIMATORS: Mapping[str, tuple[str, str, str]] = {
    "grpo": ("grpo", "group_mean", "std"),
    "rloo": ("grpo", "leave_one_out", "none"),
    "reinforce_plus_plus": ("grpo", "none", "batch_whitening"),
    "reinforce_plus_plus_baseline": ("grpo", "group_mean", "batch_whitening"),
    "gae": ("ppo", "", ""),
}
"""verl's estimators of advantages: the algorithm, its baseline and its normalisation."""
MODES: Mapping[str, tuple[str, str]] = {
    "vanilla": ("clipped", "token"),
    "gspo": ("clipped", "sequence_token"),
    "clip_cov": ("clip_cov", "token"),
    "kl_cov": ("kl_cov", "token"),
    "geo_mean": ("gmpo", "token"),
    "sapo": ("sapo", "token"),
    "cispo": ("cispo", "token"),
}
"""verl's losses: the objective and the ratio."""
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def import_recipe(path: Path, overrides: Sequence[str] = ()) -> ImportedRecipe:
    """The recipe that a configuration of verl's says, with its groups and KEY=VALUE behind it."""
    tables = with_overrides(read_hydra(path), overrides)
    missing = [
        name for name in ("data", "actor_rollout_ref", "algorithm", "trainer") if not isinstance(tables.get(name), Mapping)
    ]
    if missing:
        expected = "verl's configuration of main_ppo, with data, actor_rollout_ref, algorithm and trainer"
        raise error(
            path, f"no {', '.join(missing)}", expected, "Take ppo_trainer.yaml, and write a script's arguments behind it"
        )
    source = Source(values=resolved(tables), mapped=MAPPED, dropped=DROPPED)
    values: dict[str, Any] = {"run.device": "cuda"}
    with source.checked():
        _run(source, values)
        _model(source, values)
        _step(source, values)
        _data(source, values)
        _algorithm(source, values)
        _optimizer(source, values)
        _trainer(source, values)
        _generator(source, values)
    return source.recipe(values)


def _run(source: Source, values: dict[str, Any]) -> None:
    steps = source.take("trainer.total_training_steps")
    if not steps:
        source.report("trainer.total_training_steps", "not told, so that epochs count there: 100 steps are written")
    values["run.num_steps"] = int(steps or 100)
    values["run.directory"] = f"runs/{source.take('trainer.project_name', 'verl')}"
    values["run.name"] = str(source.take("trainer.experiment_name", "run")).replace("/", "-")
    if seed := source.take("data.seed"):
        values["run.seed"] = int(seed)
    values["checkpoint.every_n_steps"] = max(0, int(source.take("trainer.save_freq", 0)))
    nodes, gpus = int(source.take("trainer.nnodes", 1)), int(source.take("trainer.n_gpus_per_node", 8))
    values |= {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus}
    if nodes > 1:
        values["cluster.address"] = "auto"  # there, too, Ray runs on every machine before the run begins


def _model(source: Source, values: dict[str, Any]) -> None:
    prefix = "actor_rollout_ref.model"
    values["model.path"] = str(source.take(f"{prefix}.path", ""))
    values["model.dtype"] = "bfloat16"
    if source.take(f"{prefix}.trust_remote_code"):
        values["model.trust_remote_code"] = True
    if template := source.take(f"{prefix}.custom_chat_template"):
        values["model.chat_template"] = str(template)
    for name, value in (source.take("data.apply_chat_template_kwargs") or {}).items():
        if value is not None:
            values[f"model.chat_template_kwargs.{name}"] = value
    rank = int(source.take(f"{prefix}.lora_rank", 0))
    alpha, targets = source.take(f"{prefix}.lora_alpha", 16), source.take(f"{prefix}.target_modules", "all-linear")
    if rank:
        values |= {"lora.rank": rank, "lora.alpha": float(alpha)}
        values["lora.targets"] = [targets] if isinstance(targets, str) else list(targets)


def _step(source: Source, values: dict[str, Any]) -> None:
    prompts, samples = int(source.take("data.train_batch_size", 1024)), int(source.take(f"{ROLLOUT}.n", 1))
    mini = int(source.take(f"{ACTOR}.ppo_mini_batch_size", prompts))
    updates = max(1, prompts // mini)
    if prompts % mini:
        source.report(f"{ACTOR}.ppo_mini_batch_size", f"{prompts} prompts are not whole batches of it: {updates} update(s)")
    prompt, answer = int(source.take("data.max_prompt_length", 512)), int(source.take("data.max_response_length", 512))
    values |= {
        "training.prompts_per_step": prompts,
        "training.updates_per_step": updates,
        "rollout.samples_per_prompt": samples,
    }
    values |= {"rollout.max_prompt_tokens": prompt, "rollout.max_response_tokens": answer}
    most = int(source.take(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384))
    each = source.take(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    dynamic = source.take(f"{ACTOR}.use_dynamic_bsz", False)
    values["training.max_tokens_per_microbatch"] = most if dynamic or not each else int(each) * (prompt + answer)
    values["rollout.refill_equal_rewards"] = bool(source.take("algorithm.filter_groups.enable", False))


def _data(source: Source, values: dict[str, Any]) -> None:
    drops = bool(source.take("data.filter_overlong_prompts", False))
    field = str(source.take("data.prompt_key", "prompt"))
    for split, key in (("train", "data.train_files"), ("evaluation", "data.val_files")):
        files = source.take(key)
        if not files:
            continue
        if isinstance(files, list):
            if len(files) > 1:
                source.report(key, "the first of several files: [data.train.mix] has others")
            files = files[0]
        values |= {f"data.{split}.source": "parquet", f"data.{split}.path": str(files), f"data.{split}.prompt_field": field}
        values[f"data.{split}.on_long_prompt"] = "drop" if drops else "error"
    if not source.take("data.shuffle", True):
        values["data.train.shuffle"] = False
    values["environment.name"] = "math"
    source.report(
        "data.train_files", "the right answer is within reward_model there: write a field `answer`, or a function of the row"
    )
    if "data.evaluation.source" not in values:
        return
    every = int(source.take("trainer.test_freq", 0))
    values |= {
        "evaluation.every_n_steps": max(0, every),
        "evaluation.at_start": bool(source.take("trainer.val_before_train", True)),
    }
    prefix = f"{ROLLOUT}.val_kwargs"
    samples = bool(source.take(f"{prefix}.do_sample", False))
    temperature = float(source.take(f"{prefix}.temperature", 0.0))
    values["evaluation.temperature"] = temperature if samples else 0.0
    is_greedy = values["evaluation.temperature"] == 0
    top_k, top_p = max(0, int(source.take(f"{prefix}.top_k", -1))), float(source.take(f"{prefix}.top_p", 1.0))
    if not is_greedy:
        values |= {"evaluation.top_k": top_k, "evaluation.top_p": top_p}
    number = int(source.take(f"{prefix}.n", 1))
    values["evaluation.samples_per_prompt"] = 1 if is_greedy else number
    if is_greedy and number > 1:
        source.report(f"{prefix}.n", "greedy samples of one prompt are all the same: one is taken")


def _algorithm(source: Source, values: dict[str, Any]) -> None:
    name = str(source.take("algorithm.adv_estimator", "gae"))
    if name not in ESTIMATORS:
        source.report("algorithm.adv_estimator", "no such estimator of advantages: that of GRPO is taken")
    algorithm, baseline, normalisation = ESTIMATORS.get(name, ESTIMATORS["grpo"])
    section = f"algorithm.{algorithm}"
    values["algorithm.name"] = algorithm
    by_std = source.take("algorithm.norm_adv_by_std_in_grpo", True)
    if algorithm == "grpo":
        values[f"{section}.advantage_baseline"] = baseline
        values[f"{section}.advantage_normalisation"] = "none" if name == "grpo" and not by_std else normalisation
        _correction(source, values, section)
        for key in ("algorithm.gamma", "algorithm.lam"):
            if float(source.take(key, 1.0)) != 1:
                source.report(key, "nothing is discounted without a critic")
    else:
        _critic(source, values, section)
    values[f"{section}.previous_logprobs"] = "trainer"
    _loss(source, values, section)
    both = float(source.take(f"{ACTOR}.clip_ratio", 0.2))
    low, high = source.take(f"{ACTOR}.clip_ratio_low", both), source.take(f"{ACTOR}.clip_ratio_high", both)
    values |= {f"{section}.clip_low": min(1.0, float(low)), f"{section}.clip_high": float(high)}
    _divergence(source, values, section)


def _loss(source: Source, values: dict[str, Any], section: str) -> None:
    mode = str(source.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    if mode not in MODES:
        source.report(f"{ACTOR}.policy_loss.loss_mode", "no such loss: the clipped one is taken")
    if section == "algorithm.grpo":
        values[f"{section}.objective"], values[f"{section}.ratio"] = MODES.get(mode, MODES["vanilla"])
    elif mode != "vanilla":
        source.report(f"{ACTOR}.policy_loss.loss_mode", "with a critic the clipped loss is the only one")
    if section == "algorithm.grpo":
        _options_of_loss(source, values, section, mode)
    if (dual := float(source.take(f"{ACTOR}.clip_ratio_c", 3.0))) > 1 and mode == "vanilla":
        values[f"{section}.dual_clip"] = dual
    aggregation, scale = str(source.take(f"{ACTOR}.loss_agg_mode", "token-mean")), source.take(f"{ACTOR}.loss_scale_factor")
    normalisation = {"token-mean": "token", "seq-mean-token-mean": "sequence"}.get(aggregation, "constant")
    if normalisation == "constant" and section != "algorithm.grpo":
        source.report(
            f"{ACTOR}.loss_agg_mode", "with a critic the loss is a mean over sequences or tokens: sequences are taken"
        )
        normalisation = "sequence"
    values[f"{section}.loss_normalisation"] = normalisation
    if normalisation == "constant" and aggregation == "seq-mean-token-sum":
        values[f"{section}.constant_length"] = 1
    elif normalisation == "constant" and scale:
        values[f"{section}.constant_length"] = int(scale)
    if coefficient := float(source.take(f"{ACTOR}.entropy_coeff", 0.0)):
        values[f"{section}.entropy_coefficient"] = coefficient


def _options_of_loss(source: Source, values: dict[str, Any], section: str, mode: str) -> None:
    """Options that one loss alone has; those of others say nothing."""
    prefix = f"{ACTOR}.policy_loss"
    names = {
        "clip_cov": {
            "clip_cov_ratio": "covariance_share",
            "clip_cov_lb": "covariance_minimum",
            "clip_cov_ub": "covariance_maximum",
        },
        "kl_cov": {"kl_cov_ratio": "covariance_share", "ppo_kl_coef": "covariance_penalty"},
    }
    for of, keys in names.items():
        for theirs, ours in keys.items():
            value = source.take(f"{prefix}.{theirs}")
            if of == mode and value is not None:
                values[f"{section}.{ours}"] = float(value)
    for theirs, ours in (("tau_pos", "sapo_temperature_positive"), ("tau_neg", "sapo_temperature_negative")):
        value = source.take(f"{ACTOR}.{theirs}")
        if mode == "sapo" and value is not None:
            values[f"{section}.{ours}"] = float(value)


def _correction(source: Source, values: dict[str, Any], section: str) -> None:
    kind = source.take("algorithm.rollout_correction.rollout_is")
    most = source.take("algorithm.rollout_correction.rollout_is_threshold")
    values[f"{section}.importance_correction"] = kind if kind in ("token", "sequence") else "none"
    if kind in ("token", "sequence"):
        values[f"{section}.importance_maximum"] = math.inf if most is None else float(most)


def _critic(source: Source, values: dict[str, Any], section: str) -> None:
    values[f"{section}.gamma"] = float(source.take("algorithm.gamma", 1.0))
    values[f"{section}.gae_lambda"] = float(source.take("algorithm.lam", 1.0))
    values["critic.learning_rate"] = float(source.take("critic.optim.lr", 1e-5))
    path = source.take("critic.model.path")
    if path and path != values["model.path"]:
        values["critic.path"] = str(path)
    values[f"{section}.value_clip"] = float(source.take("critic.cliprange_value", 0.5))
    values[f"{section}.importance_correction"] = "none"


def _divergence(source: Source, values: dict[str, Any], section: str) -> None:
    in_loss, in_reward = source.take(f"{ACTOR}.use_kl_loss", False), source.take("algorithm.use_kl_in_reward", False)
    kinds = source.take(f"{ACTOR}.kl_loss_type", "low_var_kl"), source.take("algorithm.kl_penalty", "kl")
    coefficients = source.take(f"{ACTOR}.kl_loss_coef", 0.001), source.take("algorithm.kl_ctrl.kl_coef", 0.001)
    if not (in_loss or in_reward):
        return
    kind = str(kinds[0] if in_loss else kinds[1])
    values[f"{section}.kl_coefficient"] = float(coefficients[0] if in_loss else coefficients[1])
    estimator = KL_TYPES.get(kind.removesuffix("+"))
    if estimator is None:
        source.report(f"{ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty", "no such estimator: k3 is taken")
    values[f"{section}.kl_estimator"] = estimator or "k3"
    if section != "algorithm.grpo":
        return
    if in_loss:
        values[f"{section}.kl_gradient"] = "expectation" if kind.endswith("+") else "estimate"
    else:
        values[f"{section}.kl_placement"] = "reward_to_go"
    if in_loss and in_reward:
        source.report("algorithm.use_kl_in_reward", "the divergence counts once: in the loss")


def _optimizer(source: Source, values: dict[str, Any]) -> None:
    prefix = f"{ACTOR}.optim"
    values["optimizer.learning_rate"] = float(source.take(f"{prefix}.lr", 1e-6))
    values["optimizer.weight_decay"] = float(source.take(f"{prefix}.weight_decay", 0.01))
    values["optimizer.betas"] = [float(beta) for beta in source.take(f"{prefix}.betas", (0.9, 0.999))]
    clips = source.take(f"{ACTOR}.grad_clip"), source.take(f"{prefix}.clip_grad")
    values["optimizer.max_grad_norm"] = float(next((clip for clip in clips if clip is not None), 1.0))
    steps, share = (
        int(source.take(f"{prefix}.lr_warmup_steps", -1) or -1),
        float(source.take(f"{prefix}.lr_warmup_steps_ratio", 0.0)),
    )
    updates = values["run.num_steps"] * values["training.updates_per_step"]
    values["schedule.warmup_steps"] = steps if steps > 0 else round(share * updates)
    kind = str(source.take(f"{prefix}.lr_scheduler_type", source.take(f"{prefix}.lr_decay_style", "constant")))
    least = float(source.take(f"{prefix}.min_lr_ratio", 0.0) or 0.0)
    if kind in ("cosine", "linear"):
        values |= {"schedule.decay": kind, "schedule.min_learning_rate_ratio": least}
    elif kind != "constant":
        source.report(f"{prefix}.lr_scheduler_type", "no such schedule: the rate is constant")


def _trainer(source: Source, values: dict[str, Any]) -> None:
    is_megatron = str(source.take(f"{ACTOR}.strategy", "fsdp")) == "megatron"
    recomputes = bool(source.take("actor_rollout_ref.model.enable_gradient_checkpointing", True))
    values["trainer.name"] = "megatron" if is_megatron else "fsdp2"
    prefix = f"{ACTOR}.megatron" if is_megatron else f"{ACTOR}.fsdp_config"
    if is_megatron:
        for theirs, ours in (
            ("tensor_model_parallel_size", "tensor_parallel"),
            ("pipeline_model_parallel_size", "pipeline_parallel"),
            ("virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel"),
            ("context_parallel_size", "context_parallel"),
            ("expert_model_parallel_size", "expert_parallel"),
            ("expert_tensor_parallel_size", "expert_tensor_parallel"),
        ):
            values[f"trainer.megatron.{ours}"] = int(source.take(f"{prefix}.{theirs}", 1))
        values["trainer.megatron.recompute"] = "full" if recomputes else "none"
    else:
        values["trainer.fsdp2.context_parallel"] = int(source.take(f"{ACTOR}.ulysses_sequence_parallel_size", 1))
        values["trainer.fsdp2.activation_checkpointing"] = recomputes
    state, weights = source.take(f"{prefix}.optimizer_offload", False), source.take(f"{prefix}.param_offload", False)
    values["residency.offload_trainer"] = "all" if weights else "state" if state else "none"


def _generator(source: Source, values: dict[str, Any]) -> None:
    name = str(source.take(f"{ROLLOUT}.name", "vllm"))
    if name not in ("vllm", "???"):
        source.report(f"{ROLLOUT}.name", "samples come from vLLM, whose numerics are others", changes_meaning=False)
    values["generator.name"] = "vllm"
    values["rollout.temperature"] = float(source.take(f"{ROLLOUT}.temperature", 1.0))
    values["rollout.top_k"] = max(0, int(source.take(f"{ROLLOUT}.top_k", -1)))
    values["rollout.top_p"] = float(source.take(f"{ROLLOUT}.top_p", 1.0))
    ranks, gpus = int(source.take(f"{ROLLOUT}.tensor_model_parallel_size", 1)), values["cluster.gpus_per_node"]
    if ranks > gpus:
        source.report(f"{ROLLOUT}.tensor_model_parallel_size", f"an engine lies on one machine: {gpus}", changes_meaning=False)
    values["generator.vllm.tensor_parallel"] = ranks = min(ranks, gpus)
    if ranks > 1 and (values["rollout.top_k"] > 0 or values["rollout.top_p"] < 1):
        values["rollout.accept_truncation_bias"] = True
        source.report(
            f"{ROLLOUT}.top_p",
            "the trainer normalises over all tokens, since an engine of several ranks does not say which it kept",
        )
    values["generator.vllm.gpu_memory_utilization"] = float(source.take(f"{ROLLOUT}.gpu_memory_utilization", 0.5))
    if source.take(f"{ROLLOUT}.enforce_eager"):
        values["generator.vllm.enforce_eager"] = True
    if source.take(f"{ROLLOUT}.enable_prefix_caching") is False:
        values["generator.vllm.prefix_caching"] = False
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if found := source.take(f"{ROLLOUT}.{key}"):
            values[f"generator.vllm.{key}"] = int(found)
    if source.take(f"{ROLLOUT}.enable_rollout_routing_replay"):
        values["rollout.replay_routing"] = True
    if source.take(f"{ROLLOUT}.multi_turn.enable"):
        source.report(f"{ROLLOUT}.multi_turn.enable", "turns and tools are the environment's: choose one that has them")
