"""prime-rl's `compute_loss` and its algorithm `grpo`, from a checkout."""

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlcore_bundles.peers.checkouts import on_path, version_of
from rlcore_bundles.peers.contract import Adapter, Metrics, Peer, PeerError, Samples, Setup, Update

INSTALL = "prime-rl is no package of the index: name a checkout of github.com/PrimeIntellect-ai/prime-rl with --checkout."
WHOLE = {"advantage_baseline": "group_mean", "advantage_normalisation": "none"}
"""The options of rlcore's that are prime-rl's advantages."""
HAS_NONE = {
    "kl_coefficient": (0.0, "its KL term is the squared log ratio to the generator, weighed by kl_tau"),
    "entropy_coefficient": (0.0, "it has no entropy term"),
    "dual_clip": (None, "it has no dual clip"),
    "off_policy_maximum": (None, "it masks tokens, not sequences"),
}
NAMES = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "rl_loss_fn", "rl_scale")


class PrimeRl(Adapter):
    """prime-rl's functions with settings."""

    name = "prime-rl"

    def __init__(self, setup: Setup) -> None:
        on_path(setup, "src", "packages/prime-rl-configs/src", file="src/prime_rl/trainer/rl/loss.py")
        from prime_rl.configs.trainer import DefaultLossConfig
        from prime_rl.trainer.rl import loss

        super().__init__(setup, version_of("prime-rl", setup))
        self._module = loss
        self._map(setup)
        known = {name: one.default for name, one in DefaultLossConfig.model_fields.items()}
        self.take({**known, "type": "default"}, known)
        self._loss = loss.setup_rl_loss_fn(DefaultLossConfig(**self.settings))
        self.require(loss.compute_loss, NAMES)

    def _map(self, setup: Setup) -> None:
        """Add to `unmapped` and `reasons` which options of rlcore's prime-rl has no counterpart of."""
        options = setup.options
        if (options["objective"], options["ratio"]) not in (("clipped", "token"), ("policy_gradient", "token")):
            self.lacks_loss()
        self.unmapped.append(
            "clip_low and clip_high: prime-rl masks tokens by how far their probability moved (dppo_mask_low, dppo_mask_high)"
        )
        if options["previous_logprobs"] != "generation":
            self.lacks("previous_logprobs", "prime-rl's ratio is to the generator's log-probabilities")
        if options["loss_normalisation"] != "token":
            self.lacks("loss_normalisation", "prime-rl has the mean over tokens")
        for name, (off, why) in HAS_NONE.items():
            if options[name] != off:
                self.lacks(name, why)
        for name, value in WHOLE.items():
            if options.get(name, value) != value:
                self.lacks(name, f'prime-rl has "{value}"')

    def advantages(self, samples: Samples) -> Tensor:
        """[N], by the algorithm `grpo` of prime-rl's orchestrator."""
        try:
            from prime_rl.orchestrator.algo import grpo
        except ImportError as error:
            raise PeerError(f"prime-rl's orchestrator cannot be imported: {error}") from error
        found = []
        for group in torch.unique_consecutive(samples.group_ids):
            traces = [_trace(float(reward)) for reward in samples.rewards[samples.group_ids == group]]
            algorithm = grpo.GRPOAlgorithm.__new__(grpo.GRPOAlgorithm)
            algorithm.length_penalty = None
            asyncio.run(algorithm.score_group([SimpleNamespace(traces=[one]) for one in traces]))
            found += [one.nodes[0].advantages[0] for one in traces]
        return torch.tensor(found, dtype=samples.rewards.dtype)

    def loss(self, update: Update) -> tuple[Tensor, Metrics]:
        """prime-rl's loss of one optimizer step, in one microbatch."""
        rows = [one.nonzero()[:, 0] for one in update.mask]
        columns = {
            name: [column[row] for column, row in zip(getattr(update, name), rows, strict=True)]
            for name in ("logprobs", "generation", "advantages", "mask")
        }
        value, metrics = self._module.compute_loss(
            trainer_logprobs=columns["logprobs"],
            inference_logprobs=columns["generation"],
            ref_logprobs=None,
            advantages=columns["advantages"],
            loss_mask=columns["mask"],
            rl_weights=None,
            ce_weights=None,
            ref_kl_weights=None,
            rl_loss_fn=self._loss,
            rl_scale=int(update.mask.sum()),
            ce_scale=1,
            ref_kl_scale=1,
        )
        return value, {name: float(one.double().mean()) for name, one in metrics.items()}


def peer(setup: Setup) -> Peer:
    """prime-rl, from a checkout or as it is installed."""
    found = PrimeRl(setup)
    return found.peer(
        ["prime_rl.trainer.rl.loss.compute_loss", "prime_rl.orchestrator.algo.grpo.GRPOAlgorithm.score_group"], {}
    )


def _trace(reward: float) -> Any:
    """A trace with one sampled token, of which prime-rl reads the reward."""
    node = SimpleNamespace(mask=[True], token_ids=[0], advantages=None)
    agent = SimpleNamespace(trainable=True)
    return SimpleNamespace(id="0", has_error=False, agent=agent, nodes=[node], reward=reward)
