"""verl's estimators of advantages, its correction of rollouts, and its loss of the actor, called in verl's own order."""

import inspect
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rlcore_bundles.peers.contract import Adapter, Metrics, Peer, Samples, Setup, Update

INSTALL = "Run: {python} -m pip install verl."
ESTIMATORS = {
    ("group_mean", "std"): ("grpo", True),
    ("group_mean", "none"): ("grpo", False),
    ("leave_one_out", "none"): ("rloo", True),
    ("none", "batch_whitening"): ("reinforce_plus_plus", True),
    ("group_mean", "batch_whitening"): ("reinforce_plus_plus_baseline", True),
}
"""verl's estimator, and whether it divides by the deviation, by rlcore's baseline and normalisation."""
LOSSES = {
    ("clipped", "token"): "vanilla",
    ("clipped", "sequence"): "gspo",
    ("clipped", "sequence_token"): "gspo",
    ("sapo", "token"): "sapo",
    ("gmpo", "token"): "geo_mean",
    ("cispo", "token"): "cispo",
    ("policy_gradient", "token"): "gpg",
}
"""verl's loss by rlcore's objective and ratio."""
MEANS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
METRICS = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "dual_clip_fraction",
    "kl_loss": "kl",
    "rollout_corr/rollout_is_mean": "importance_weight",
}
OF_POLICY_LOSS = ("loss_mode",)


class Verl(Adapter):
    """verl's functions with settings."""

    name = "verl"

    def __init__(self, setup: Setup) -> None:
        import verl
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.workers.config import ActorConfig, PolicyLossConfig
        from verl.workers.utils import losses

        super().__init__(setup, f"verl {verl.__version__}")
        self._core, self._correction, self._losses = core_algos, rollout_corr_helper, losses
        actor = {one.name: one.default for one in fields(ActorConfig)}
        known = {**actor, "loss_mode": "vanilla", "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None}
        known |= {"rollout_rs_threshold": None, "bypass_mode": False, "adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True}
        self.take(self._mapped(setup), known)
        self._samples_per_prompt = setup.samples_per_prompt
        of_actor = {name: value for name, value in self.settings.items() if name in actor and name not in OF_POLICY_LOSS}
        self._config = ActorConfig(
            strategy="fsdp",
            rollout_n=setup.samples_per_prompt,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(loss_mode=self.settings["loss_mode"]),
            **of_actor,
        )
        self.require(losses.ppo_loss, ("config", "model_output", "data"))
        names = ("old_log_prob", "rollout_log_prob", "response_mask", "rollout_is", "rollout_is_threshold", "rollout_rs")
        self.require(rollout_corr_helper.compute_rollout_correction_and_rejection_mask, names)

    def _mapped(self, setup: Setup) -> dict[str, Any]:
        """verl's options for rlcore's; adds to `unmapped` and `reasons` what has none."""
        options = setup.options
        found: dict[str, Any] = {}
        if "advantage_baseline" in options:
            found |= self._estimator(options)
        loss = LOSSES.get((options["objective"], options["ratio"]))
        if loss is None:
            self.lacks_loss()
        found |= {"loss_mode": loss or "vanilla", "loss_agg_mode": MEANS[options["loss_normalisation"]]}
        if options["loss_normalisation"] == "constant":
            found["loss_scale_factor"] = options["constant_length"]
        found |= {"clip_ratio_low": options["clip_low"], "clip_ratio_high": options["clip_high"]}
        if options["dual_clip"] is not None:
            found["clip_ratio_c"] = options["dual_clip"]
        elif loss == "vanilla":
            self.lacks("dual_clip", "verl always has one, by default clip_ratio_c = 3.0")
        if loss == "sapo":
            found |= {"tau_pos": options["sapo_temperature_positive"], "tau_neg": options["sapo_temperature_negative"]}
        if options["entropy_coefficient"]:
            found["entropy_coeff"] = options["entropy_coefficient"]
        if options["kl_coefficient"]:
            found |= self._divergence(options)
        return found | self._rollout_correction(options)

    def _estimator(self, options: Any) -> dict[str, Any]:
        key = options["advantage_baseline"], options["advantage_normalisation"]
        if key not in ESTIMATORS:
            self.reasons["advantages"] = f'verl has no estimator for the baseline "{key[0]}" with the normalisation "{key[1]}"'
        name, by_std = ESTIMATORS.get(key, ("grpo", True))
        if options["advantage_epsilon"] != 1e-6 and name == "grpo" and by_std:
            self.lacks("advantage_epsilon", "verl's trainer always has 1e-06")
        if options["length_penalty"] != "none":
            self.lacks("length_penalty", "verl is given the rewards with it")
        return {"adv_estimator": name, "norm_adv_by_std_in_grpo": by_std}

    def _divergence(self, options: Any) -> dict[str, Any]:
        kind = {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}[options["kl_estimator"]]
        if options["kl_gradient"] == "expectation" and options["kl_estimator"] == "k1":
            kind = "k1+"
        elif options["kl_gradient"] == "expectation":
            self.lacks("kl_gradient", "verl differentiates the estimate, or with the sign + takes that of k2")
        if options["kl_importance"] != "none":
            self.lacks("kl_importance", "verl does not weigh estimates")
        return {"use_kl_loss": True, "kl_loss_coef": options["kl_coefficient"], "kl_loss_type": kind}

    def _rollout_correction(self, options: Any) -> dict[str, Any]:
        if options["previous_logprobs"] == "generation":
            return {"bypass_mode": True}
        found: dict[str, Any] = {}
        if options["importance_correction"] != "none":
            low, high = options["importance_minimum"], options["importance_maximum"]
            threshold = f"{low}_{high}" if options["importance_bound"] == "mask" and low > 0 else high
            found = {"rollout_is": options["importance_correction"], "rollout_is_threshold": threshold}
            if options["importance_bound"] == "mask" and low <= 0:
                self.unmapped.append('importance_bound = "mask" without importance_minimum: verl truncates')
            if options["importance_bound"] == "truncate" and low > 0:
                self.lacks("importance_minimum", "verl truncates from above alone")
        low, high = options["geometric_minimum"], options["geometric_maximum"]
        if low > 0 or high < float("inf"):
            # verl bounds the generator's probability over the trainer's.
            bounds = f"{1 / high}_{1 / low if low > 0 else 1e9}"
            found |= {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": bounds}
        if options["off_policy_maximum"] is not None:
            self.unmapped.append("off_policy_maximum: verl masks no sequence by its distance from the policy")
        return found

    def advantages(self, samples: Samples) -> Tensor:
        """[N, R], by the estimator that verl's trainer takes, with verl's own defaults."""
        from verl.trainer.config import AlgoConfig

        name = self.settings["adv_estimator"]
        estimate = self._core.get_adv_estimator_fn(name)
        mask = samples.mask.to(samples.rewards.dtype)
        rewards = torch.zeros_like(mask)
        has = samples.mask.any(1)
        rewards[torch.arange(len(mask))[has], samples.mask.int().cumsum(1).argmax(1)[has]] = samples.rewards[has]
        given: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask}
        self.require(estimate, given)
        if "index" in _parameters(estimate):
            given["index"] = samples.group_ids.numpy()
        if "norm_adv_by_std_in_grpo" in _parameters(estimate):
            given["norm_adv_by_std_in_grpo"] = self.settings["norm_adv_by_std_in_grpo"]
        if "config" in _parameters(estimate):
            given["config"] = AlgoConfig(adv_estimator=name)
        found: Tensor = estimate(**given)[0]
        return found

    def loss(self, update: Update) -> tuple[Tensor, Metrics]:
        """The actor's loss of one update on one device, by verl's `ppo_loss`."""
        from tensordict import TensorDict

        mask, previous = update.mask, update.previous
        more: dict[str, float] = {}
        columns: dict[str, Tensor] = {}
        if self.settings.get("bypass_mode"):
            previous = update.generation
        elif self.settings.get("rollout_is") or self.settings.get("rollout_rs"):
            mask, columns, more = self._corrected(update)
        count, width = mask.shape
        columns |= {"response_mask": mask, "old_log_probs": previous, "advantages": update.advantages}
        if self._config.use_kl_loss:
            columns["ref_log_prob"] = update.reference
        data = TensorDict(
            {
                **columns,
                "prompts": torch.zeros(count, 1, dtype=torch.int64),
                "responses": torch.zeros(count, width, dtype=torch.int64),
                "attention_mask": torch.ones(count, 1 + width, dtype=torch.int64),
            },
            batch_size=[count],
        )
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=count)
        # verl's models return the log-probability of the next token at each place.
        output = {name: _shifted(column) for name, column in (("log_probs", update.logprobs), ("entropy", update.entropies))}
        value, metrics = self._losses.ppo_loss(self._config, output, data)
        return value, more | {name: _number(one) for name, one in metrics.items()}

    def _corrected(self, update: Update) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        """Mask, columns and metrics of verl's correction for the generator."""
        names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
        given = {name: self.settings[name] for name in names if name in self.settings}
        proto, mask, metrics = self._correction.compute_rollout_correction_and_rejection_mask(
            old_log_prob=update.previous, rollout_log_prob=update.generation, response_mask=update.mask, **given
        )
        weights = {} if proto is None else {"rollout_is_weights": proto.batch["rollout_is_weights"].to(update.logprobs.dtype)}
        return mask.bool(), weights, {name: float(one) for name, one in metrics.items()}


def peer(setup: Setup) -> Peer:
    """verl, as it is installed."""
    found = Verl(setup)
    loss = found.settings["loss_mode"]
    names = dict(METRICS)
    if loss not in ("vanilla", "gspo", "cispo", "geo_mean"):
        names.pop("actor/pg_clipfrac")
    if loss != "vanilla":
        names.pop("actor/pg_clipfrac_lower")
    return found.peer(
        [
            f"verl.trainer.ppo.core_algos: the estimator {found.settings.get('adv_estimator')!r} and the loss {loss!r}",
            "verl.workers.utils.losses.ppo_loss",
            "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_rejection_mask",
        ],
        names,
    )


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


def _shifted(column: Tensor) -> Tensor:
    """[N (R + 1)]: each row behind one place more, whose entry is that of the next token."""
    return torch.cat([column, torch.zeros_like(column[:, :1])], 1).reshape(-1)


def _number(metric: Any) -> float:
    """One of verl's metrics, which are numbers or hold some."""
    value = metric.aggregate() if hasattr(metric, "aggregate") else metric
    return float(value.detach() if isinstance(value, Tensor) else value)
