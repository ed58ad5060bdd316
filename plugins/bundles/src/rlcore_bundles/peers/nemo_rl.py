"""NeMo-RL's estimators of advantages and its ClippedPGLossFn, from a checkout."""

from typing import Any

from torch import Tensor

from rlcore_bundles.peers.checkouts import on_path, padded_front, version_of
from rlcore_bundles.peers.contract import Adapter, Metrics, Peer, Samples, Setup, Update

INSTALL = "NeMo-RL is no package of the index: name a checkout of github.com/NVIDIA-NeMo/RL with --checkout."
METRICS = {"probs_ratio": "ratio_mean", "kl_penalty": "kl"}
OF_ESTIMATOR = ("name", "normalize_rewards", "use_leave_one_out_baseline", "minus_baseline")


class NemoRl(Adapter):
    """NeMo-RL's functions with settings."""

    name = "NeMo-RL"

    def __init__(self, setup: Setup) -> None:
        on_path(setup, ".", file="nemo_rl/algorithms/loss/loss_functions.py")
        from nemo_rl.algorithms import advantage_estimator
        from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

        super().__init__(setup, version_of("NeMo-RL", setup))
        known = {name: one.default for name, one in ClippedPGLossConfig.model_fields.items()}
        known |= {name: one.default for name, one in advantage_estimator.AdvEstimatorConfig.model_fields.items()}
        self._previous_is_generation = setup.options["previous_logprobs"] == "generation"
        self.take(self._mapped(setup), known)
        of_loss = {name: value for name, value in self.settings.items() if name not in OF_ESTIMATOR}
        config = ClippedPGLossConfig(**of_loss)
        self._loss = ClippedPGLossFn(config)
        of_estimator = {name: value for name, value in self.settings.items() if name in OF_ESTIMATOR}
        kinds = {
            "grpo": advantage_estimator.GRPOAdvantageEstimator,
            "reinforce_plus_plus": advantage_estimator.ReinforcePlusPlusAdvantageEstimator,
        }
        estimator = kinds[of_estimator.get("name", "grpo")]
        self._estimator = estimator(advantage_estimator.AdvEstimatorConfig(**of_estimator), config)
        self.require(self._estimator.compute_advantage, ("prompt_ids", "rewards", "mask"))
        names = ("next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")
        self.require(self._loss.__call__, names)

    def _mapped(self, setup: Setup) -> dict[str, Any]:
        """NeMo-RL's options for rlcore's; adds to `unmapped` and `reasons` what has none."""
        options, found = setup.options, self._mapped_estimator(setup.options)
        objective, ratio, mean = options["objective"], options["ratio"], options["loss_normalisation"]
        if objective not in ("clipped", "cispo", "policy_gradient") or ratio == "sequence_product":
            self.lacks_loss()
        if mean == "constant":
            self.lacks("loss_normalisation", "NeMo-RL has means over tokens or sequences")
        is_sequence = ratio in ("sequence", "sequence_token")
        found |= {"token_level_loss": mean != "sequence" and not is_sequence, "sequence_level_importance_ratios": is_sequence}
        found |= {
            "ratio_clip_min": options["clip_low"],
            "ratio_clip_max": options["clip_high"],
            "ratio_clip_c": options["dual_clip"],
        }
        found |= {"use_cispo": objective == "cispo", "disable_ppo_ratio": objective == "policy_gradient"}
        found |= {
            "reference_policy_kl_penalty": options["kl_coefficient"],
            "reference_policy_kl_type": options["kl_estimator"],
            "use_on_policy_kl_approximation": options["kl_importance"] == "generation",
        }
        if options["kl_coefficient"] and options["kl_gradient"] == "estimate":
            self.lacks("kl_gradient", "NeMo-RL has the gradient of the expectation")
        for name, off in (("entropy_coefficient", 0.0), ("off_policy_maximum", None)):
            if options[name] != off:
                self.lacks(name, "NeMo-RL has no such term")
        return found | self._correction(options)

    def _mapped_estimator(self, options: Any) -> dict[str, Any]:
        if "advantage_baseline" not in options:
            return {}
        baseline, normalisation = options["advantage_baseline"], options["advantage_normalisation"]
        if normalisation == "batch_whitening":
            return {"name": "reinforce_plus_plus", "minus_baseline": baseline == "group_mean"}
        if baseline not in ("group_mean", "leave_one_out") or normalisation not in ("std", "leave_one_out_std", "none"):
            self.reasons["advantages"] = f'NeMo-RL has no estimator for "{baseline}" with "{normalisation}"'
        if normalisation == "std" and baseline == "leave_one_out":
            self.lacks("advantage_normalisation", "with that baseline NeMo-RL takes the deviation of the others")
        if normalisation != "none" and options["advantage_epsilon"] != 1e-6:
            self.lacks("advantage_epsilon", "NeMo-RL always has 1e-06")
        return {"normalize_rewards": normalisation != "none", "use_leave_one_out_baseline": baseline == "leave_one_out"}

    def _correction(self, options: Any) -> dict[str, Any]:
        if options["previous_logprobs"] == "generation" or options["importance_correction"] == "none":
            return {}
        level = "sequence" if options["ratio"] != "token" else "token"
        if options["importance_correction"] != level:
            self.lacks("importance_correction", f'NeMo-RL has that of the ratio, "{level}"')
        kind = {"truncate": "tis", "mask": "icepop"}[options["importance_bound"]]
        found = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind}
        return found | {
            "truncated_importance_sampling_ratio": options["importance_maximum"],
            "truncated_importance_sampling_ratio_min": options["importance_minimum"],
        }

    def advantages(self, samples: Samples) -> Tensor:
        """[N, R], by NeMo-RL's estimator."""
        mask = samples.mask.to(samples.rewards.dtype)
        found: Tensor = self._estimator.compute_advantage(
            prompt_ids=samples.group_ids[:, None], rewards=samples.rewards, mask=mask
        )
        return found

    def loss(self, update: Update) -> tuple[Tensor, Metrics]:
        """NeMo-RL's loss of one update, which is one global batch."""
        mask = update.mask.to(update.logprobs.dtype)
        previous = update.generation if self._previous_is_generation else update.previous
        # A place of the prompt stands in front: NeMo-RL drops the first of each row.
        columns = {
            "token_mask": mask,
            "advantages": update.advantages,
            "prev_logprobs": previous,
            "generation_logprobs": update.generation,
            "reference_policy_logprobs": update.reference,
        }
        data: dict[str, Tensor] = {name: padded_front(column) for name, column in columns.items()}
        data["sample_mask"] = update.mask.any(1).to(mask.dtype)
        value, metrics = self._loss(
            next_token_logprobs=update.logprobs,
            data=data,
            global_valid_seqs=data["sample_mask"].sum(),
            global_valid_toks=mask.sum(),
        )
        return value, {name: float(one) for name, one in metrics.items()}


def peer(setup: Setup) -> Peer:
    """NeMo-RL, from a checkout or as it is installed."""
    found = NemoRl(setup)
    return found.peer(
        [
            "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn",
            f"nemo_rl.algorithms.advantage_estimator.{type(found._estimator).__name__}",
        ],
        {} if found.settings["disable_ppo_ratio"] else METRICS,
    )
