"""slime's `loss_function` of the Megatron backend and its rewards of groups, from a checkout."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlcore_bundles.peers.checkouts import on_path, version_of
from rlcore_bundles.peers.contract import Adapter, Metrics, Peer, PeerError, Samples, Setup, Update

INSTALL = "slime is no package of the index: name a checkout of github.com/THUDM/slime with --checkout."
DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "use_rollout_logprobs": False,
    "calculate_per_token_loss": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
}
"""The arguments of slime that it reads here, with slime's defaults."""
FIXED = {"loss_type": "policy_loss", "recompute_loss_function": False, "allgather_cp": False, "get_mismatch_metrics": False}
FIXED |= {"rollout_top_p": 1.0}
METRICS = {"pg_clipfrac": "clip_fraction", "kl_loss": "kl", "tis": "importance_weight"}
ESTIMATORS = {("clipped", "token"): "grpo", ("clipped", "sequence"): "gspo", ("cispo", "token"): "cispo"}


class Slime(Adapter):
    """slime's functions with settings."""

    name = "slime"

    def __init__(self, setup: Setup) -> None:
        on_path(setup, ".", file="slime/backends/megatron_utils/loss.py")
        from slime.backends.megatron_utils import cp_utils, loss

        super().__init__(setup, version_of("slime", setup))
        self._module = loss
        self.take(self._mapped(setup), DEFAULTS)
        self._samples_per_prompt = setup.samples_per_prompt
        self.require(loss.loss_function, ("args", "batch", "num_microbatches", "step_global_batch_size", "logits"))
        # One process without a model: the model's log-probabilities are given, and Megatron counts one rank.
        loss.get_log_probs_and_entropy = self._given
        one = SimpleNamespace(
            get_context_parallel_world_size=lambda: 1,
            get_context_parallel_rank=lambda: 0,
            get_data_parallel_world_size=lambda **_: 1,
            get_tensor_model_parallel_group=lambda: None,
        )
        loss.mpu = cp_utils.mpu = one
        self._columns: dict[str, list[Tensor]] = {}

    def _given(self, *_: Any, **__: Any) -> tuple[None, dict[str, list[Tensor]]]:
        return None, self._columns

    def _mapped(self, setup: Setup) -> dict[str, Any]:
        """slime's arguments for rlcore's options; adds to `unmapped` and `reasons` what has none."""
        options = setup.options
        estimator = ESTIMATORS.get((options["objective"], options["ratio"]))
        if estimator is None:
            self.lacks_loss()
        found = {
            "advantage_estimator": estimator or "grpo",
            "eps_clip": options["clip_low"],
            "eps_clip_high": options["clip_high"],
        }
        found |= {"eps_clip_c": options["dual_clip"], "calculate_per_token_loss": options["loss_normalisation"] == "token"}
        if options["loss_normalisation"] == "constant":
            self.lacks("loss_normalisation", "slime has means over tokens or sequences")
        if "advantage_baseline" in options:
            key = options["advantage_baseline"], options["advantage_normalisation"]
            if key[0] != "group_mean" or key[1] not in ("std", "none"):
                self.reasons["advantages"] = f'slime has no estimator for "{key[0]}" with "{key[1]}"'
            found["grpo_std_normalization"] = key[1] == "std"
            if key[1] == "std" and options["advantage_epsilon"] != 1e-6:
                self.lacks("advantage_epsilon", "slime always has 1e-06")
        if options["kl_coefficient"]:
            kind = "low_var_kl" if options["kl_estimator"] == "k3" else options["kl_estimator"]
            found |= {"use_kl_loss": True, "kl_loss_coef": options["kl_coefficient"], "kl_loss_type": kind}
            found["use_unbiased_kl"] = options["kl_importance"] != "none"
            if options["kl_gradient"] == "expectation":
                self.lacks("kl_gradient", "slime differentiates the estimate")
        if options["entropy_coefficient"]:
            found["entropy_coef"] = options["entropy_coefficient"]
        if options["off_policy_maximum"] is not None:
            found |= {"use_opsm": True, "opsm_delta": options["off_policy_maximum"]}
        return found | self._correction(options)

    def _correction(self, options: Any) -> dict[str, Any]:
        if options["previous_logprobs"] == "generation":
            return {"use_rollout_logprobs": True}
        if options["importance_correction"] == "none":
            return {}
        if options["importance_correction"] == "sequence":
            self.lacks("importance_correction", "slime weighs tokens")
        found = {"use_tis": True, "tis_clip": options["importance_maximum"], "tis_clip_low": options["importance_minimum"]}
        if options["importance_bound"] == "mask":
            found["custom_tis_function_path"] = "slime.backends.megatron_utils.loss.icepop_function"
        return found

    @property
    def _args(self) -> SimpleNamespace:
        return SimpleNamespace(**{**DEFAULTS, **FIXED, **self.settings})

    def advantages(self, samples: Samples) -> Tensor:
        """[N], of the rewards that slime's rollout manager makes."""
        try:
            from slime.ray.rollout import RolloutManager
        except ImportError as error:
            raise PeerError(f"slime's rollout manager cannot be imported: {error}") from error
        args = self._args
        args.n_samples_per_prompt = self._samples_per_prompt
        args.rollout_batch_size = len(samples.rewards) // self._samples_per_prompt
        manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
        given = [SimpleNamespace(get_reward_value=lambda _, reward=float(one): reward) for one in samples.rewards]
        kind = getattr(RolloutManager, "__ray_actor_class__", RolloutManager)
        return torch.tensor(kind._post_process_rewards(manager, given)[1], dtype=samples.rewards.dtype)

    def loss(self, update: Update) -> tuple[Tensor, Metrics]:
        """slime's loss of one optimizer step in one microbatch, divided as Megatron does."""
        lengths = [update.mask.shape[1]] * len(update.mask)
        rows = {
            name: list(getattr(update, name))
            for name in ("logprobs", "previous", "generation", "reference", "advantages", "entropies")
        }
        masks = [one.to(update.logprobs.dtype) for one in update.mask]
        self._columns = {"log_probs": rows["logprobs"], "entropy": rows["entropies"]}
        batch = {
            "advantages": rows["advantages"],
            "log_probs": [one.detach() for one in rows["previous"]],
            "rollout_log_probs": [one.detach() for one in rows["generation"]],
            "ref_log_probs": rows["reference"],
            "loss_masks": masks,
            "response_lengths": lengths,
            "total_lengths": [length + 1 for length in lengths],
            "rollout_mask_sums": [one.sum() for one in masks],
            "unconcat_tokens": None,
        }
        args = self._args
        value, normalizer, log = self._module.loss_function(args, batch, 1, len(masks), torch.zeros(1))
        by = float(normalizer)
        counts = by if args.calculate_per_token_loss else len(masks)
        return value / by, {name: float(one) / counts for name, one in zip(log["keys"], log["values"][1:], strict=True)}


def peer(setup: Setup) -> Peer:
    """slime, from a checkout or as it is installed."""
    found = Slime(setup)
    return found.peer(
        [
            "slime.backends.megatron_utils.loss.loss_function",
            "slime.ray.rollout.RolloutManager._post_process_rewards",
        ],
        METRICS,
    )
