"""TRL's GRPOTrainer and RLOOTrainer: their own methods, on an object that has no model but given log-probabilities.

`_generate_and_score_completions` makes advantages, masks and importance weights; `_compute_loss` makes the loss.
"""

import tempfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlcore_bundles.peers.contract import Adapter, Metrics, Peer, PeerError, Samples, Setup, Update

INSTALL = "Run: {python} -m pip install trl."
SCALES = {"std": "group", "batch_std": "batch", "none": "none"}
"""TRL's scale_rewards by rlcore's normalisation of advantages."""
CLIPPED = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
"""TRL's loss_type by rlcore's normalisation of the clipped loss."""
OTHERS = {"cispo": ("cispo", "token"), "sapo": ("sapo", "sequence"), "vespo": ("vespo", "token")}
"""TRL's loss_type, and the normalisation that it has, by rlcore's objective."""
METRICS = {
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
    "kl": "kl",
    "sampling/importance_sampling_ratio/mean": "importance_weight",
    "vespo/phi_seq_mean": "kernel_mean",
}
END, OTHER = 1, 2
"""Token ids: that which ends an answer, and any other."""


class _Accelerator:
    """One process."""

    device = torch.device("cpu")
    process_index, num_processes = 0, 1
    is_main_process = sync_gradients = True

    def gather(self, value: Any) -> Any:
        return value

    def gather_for_metrics(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, reduction: str = "sum") -> Any:  # noqa: ARG002
        return value

    def unwrap_model(self, model: Any) -> Any:
        return model


def _trainer_class(base: Any) -> Any:
    """A subclass of one of TRL's trainers that has no model. What it is not given is read from its arguments, as TRL's
    constructor does."""

    class Given(base):  # type: ignore[misc]
        def __init__(self, args: Any, **given: Any) -> None:
            self.__dict__.update(args=args, **given)

        def __getattr__(self, name: str) -> Any:
            args = self.__dict__["args"]
            if hasattr(args, name):
                return getattr(args, name)
            raise PeerError(
                f"found an access to {base.__name__}.{name}, which the adapter does not set; take another version of TRL"
            )

        def _generate(self, prompts: list[Any]) -> Any:  # noqa: ARG002
            return self.generated

        def _calculate_rewards(self, *_: Any) -> Any:
            return self.given_rewards[:, None].clone()

        def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> Any:
            columns = self.columns
            if model is self.ref_model:
                return columns["reference"], None, None
            if model == "policy":
                return columns["logprobs"], columns["entropies"], None
            return columns["previous"], None, None

    return Given


class Trl(Adapter):
    """One of TRL's trainers with settings."""

    name = "TRL"

    def __init__(self, setup: Setup) -> None:
        import trl

        super().__init__(setup, f"TRL {trl.__version__}")
        self._is_rloo = setup.options["ratio"] == "sequence_product"
        base, config = (trl.RLOOTrainer, trl.RLOOConfig) if self._is_rloo else (trl.GRPOTrainer, trl.GRPOConfig)
        self._base, self._config_class, self._setup = base, config, setup
        self._trainer = _trainer_class(base)
        mapped = self._rloo(setup) if self._is_rloo else self._grpo(setup)
        known = {name: one.default for name, one in config.__dataclass_fields__.items()}
        self.take(mapped, known)
        self.require(base._compute_loss, ("model", "inputs"))
        self.require(base._generate_and_score_completions, ("inputs",))
        names = ("model", "input_ids", "compute_entropy", "compute_aux_loss")
        self.require(base._get_per_token_logps_and_entropies, names)

    def _grpo(self, setup: Setup) -> dict[str, Any]:
        """GRPOTrainer's options for rlcore's; adds to `unmapped` and `reasons` what has none."""
        options, found = setup.options, self._estimator(setup, "group_mean")
        objective, normalisation = options["objective"], options["loss_normalisation"]
        loss_type, fixed = OTHERS.get(objective, (CLIPPED[normalisation], normalisation))
        if objective not in ("clipped", *OTHERS):
            self.reasons["loss"] = f'TRL has no loss for objective = "{objective}"'
        if fixed != normalisation:
            self.lacks("loss_normalisation", f'TRL\'s {loss_type} has "{fixed}"')
        found |= {"loss_type": loss_type, "epsilon": options["clip_low"], "epsilon_high": options["clip_high"]}
        if objective == "cispo":
            found["epsilon_high"] = 1 + options["clip_high"]  # TRL bounds the ratio itself
            if options["clip_low"] < 1:
                self.lacks("clip_low", "TRL's cispo clips from above alone")
        if loss_type == "dr_grpo":
            found["max_completion_length"] = options["constant_length"]
        if objective == "clipped" and options["dual_clip"] is not None:
            found["delta"] = options["dual_clip"]
        if options["ratio"] != "token":
            found["importance_sampling_level"] = "sequence"
        if options["ratio"] == "sequence_token":
            self.lacks("ratio", 'TRL has the gradient of "sequence"')
        names = {"sapo_temperature_pos": "sapo_temperature_positive", "sapo_temperature_neg": "sapo_temperature_negative"}
        kernel = {
            "k_pos": "power_positive",
            "lambda_pos": "decay_positive",
            "k_neg": "power_negative",
            "lambda_neg": "decay_negative",
        }
        names |= {f"vespo_{theirs}": f"vespo_{ours}" for theirs, ours in kernel.items()}
        found |= {theirs: options[ours] for theirs, ours in names.items() if ours.startswith(objective)}
        if options["kl_coefficient"]:
            found |= self._divergence(options)
        if options["entropy_coefficient"]:
            found["entropy_coef"] = options["entropy_coefficient"]
        if options["off_policy_maximum"] is not None:
            found["off_policy_mask_threshold"] = options["off_policy_maximum"]
        return found | self._correction(options)

    def _rloo(self, setup: Setup) -> dict[str, Any]:
        """RLOOTrainer's options for rlcore's."""
        options, found = setup.options, self._estimator(setup, "leave_one_out")
        if options["objective"] != "clipped":
            self.reasons["loss"] = f'TRL\'s RLOOTrainer has no loss for objective = "{options["objective"]}"'
        if options["loss_normalisation"] != "sequence":
            self.lacks("loss_normalisation", 'TRL\'s RLOOTrainer has "sequence"')
        for name, off in (
            ("dual_clip", None),
            ("kl_coefficient", 0.0),
            ("entropy_coefficient", 0.0),
            ("off_policy_maximum", None),
        ):
            if options[name] != off:
                self.lacks(name, "TRL's RLOOTrainer has no such term in its loss")
        if options["importance_correction"] != "none" and options["previous_logprobs"] != "generation":
            self.unmapped.append("importance_correction: TRL's RLOOTrainer has none")
        return found | {"epsilon": options["clip_low"], "epsilon_high": options["clip_high"]}

    def _estimator(self, setup: Setup, baseline: str) -> dict[str, Any]:
        options = setup.options
        found: dict[str, Any] = {"num_generations": setup.samples_per_prompt}
        found["mask_truncated_completions"] = setup.masks_truncated
        if "advantage_baseline" not in options:
            return found
        normalisation = options["advantage_normalisation"]
        if options["advantage_baseline"] != baseline:
            self.lacks("advantage_baseline", f'{self._base.__name__} has "{baseline}"')
        if self._is_rloo:
            if normalisation not in ("none", "batch_whitening"):
                self.lacks("advantage_normalisation", 'RLOOTrainer has "none", or whitening of the batch')
            found["normalize_advantages"] = normalisation != "none"
        else:
            if normalisation not in SCALES:
                self.lacks("advantage_normalisation", "GRPOTrainer has group, batch and none")
            found["scale_rewards"] = SCALES.get(normalisation, "group")
        if normalisation != "none" and options["advantage_epsilon"] != 1e-4:
            self.lacks("advantage_epsilon", "TRL always has 0.0001")
        if options["length_penalty"] != "none":
            self.lacks("length_penalty", "TRL is given the rewards with it")
        return found

    def _divergence(self, options: Any) -> dict[str, Any]:
        if options["kl_estimator"] != "k3":
            self.lacks("kl_estimator", "TRL has k3")
        if options["kl_gradient"] != "estimate":
            self.lacks("kl_gradient", "TRL differentiates the estimate alone")
        if options["kl_importance"] == "generation":
            self.lacks("kl_importance", "TRL weighs by the ratio to the previous policy")
        return {"beta": options["kl_coefficient"], "use_bias_correction_kl": options["kl_importance"] != "none"}

    def _correction(self, options: Any) -> dict[str, Any]:
        if options["geometric_minimum"] > 0 or options["geometric_maximum"] < float("inf"):
            self.unmapped.append("geometric_minimum and geometric_maximum: TRL masks no sequence by its mean ratio")
        if options["previous_logprobs"] == "generation":
            self.lacks("previous_logprobs", "TRL's ratio is to the trainer's; it is given the generator's as these")
            return {"use_vllm": False}
        if options["importance_correction"] == "none":
            return {"use_vllm": True, "vllm_importance_sampling_correction": False}
        mode = f"{options['importance_correction']}_{options['importance_bound']}"
        low, high = options["importance_minimum"], options["importance_maximum"]
        return {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": None if high == float("inf") else high,
            "vllm_importance_sampling_clip_min": low or None,
        }

    def _made(self, *, num_updates: int, num_generations: int, **given: Any) -> Any:
        """A trainer with the settings."""
        settings = {**self.settings, "num_generations": max(num_generations, 2), "use_vllm": False}
        settings |= {"output_dir": tempfile.gettempdir(), "use_cpu": True, "bf16": False, "report_to": "none"}
        # One optimizer step a slice of the generation batch, so that the old log-probabilities are read.
        settings |= {
            "per_device_train_batch_size": settings["num_generations"],
            "gradient_accumulation_steps": 1,
            "steps_per_generation": num_updates,
        }
        args = self._config_class(**settings, num_iterations=2)
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=END, batch_decode=lambda ids, **_: [""] * len(ids))
        logs: dict[str, Any] = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
        model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
        return self._trainer(
            args,
            **given,
            accelerator=_Accelerator(),
            model=model,
            ref_model="reference",
            num_generations=num_generations,
            use_vllm=self.settings.get("use_vllm", False),
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            reward_weights=torch.ones(1),
            reward_funcs=[None],
            reward_func_names=["reward"],
            environment_factories=None,
            environments=None,
            tools=[],
            eos_token_ids=[END],
            _tokenizer=tokenizer,
            processing_class=tokenizer,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
            _logs=logs,
            _pending_extra_logs=defaultdict(list),
            _pending_metrics=defaultdict(list),
            aux_loss_enabled=False,
            _entropy_bonus_enabled=bool(self.settings.get("entropy_coef")),
            current_gradient_accumulation_steps=1,
            beta=self.settings.get("beta", 0.0),
        )

    def _scored(self, trainer: Any, mask: Tensor, truncated: Tensor, generation: Tensor | None) -> dict[str, Any]:
        """The batch that TRL makes of given answers before their loss."""
        lengths = [max(1, int(one.nonzero().max()) + 1 if one.any() else 1) for one in mask]
        ids = [
            [OTHER] * (length - 1) + [OTHER if cut else END] for length, cut in zip(lengths, truncated.tolist(), strict=True)
        ]
        given = [[OTHER]] * len(mask)
        masks = [one[:length].long().tolist() for one, length in zip(mask, lengths, strict=True)]
        logprobs = (
            None if generation is None else [one[:length].tolist() for one, length in zip(generation, lengths, strict=True)]
        )
        texts = [""] * len(mask)
        whole: tuple[Any, ...] = (given, ids, masks, texts, logprobs, {}, None, None)
        trainer.__dict__["generated"] = (given, ids, texts) if self._is_rloo else whole
        trainer.__dict__["_is_vlm"] = False
        found: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": ""} for _ in texts])
        return found

    def advantages(self, samples: Samples) -> Tensor:
        """[N], by TRL's trainer."""
        sizes = torch.unique_consecutive(samples.group_ids, return_counts=True)[1]
        if len(sizes.unique()) > 1:
            raise PeerError(
                f"TRL's groups have one size; found {int(sizes.min())} to {int(sizes.max())} valid samples in a group"
            )
        zeros = torch.zeros_like(samples.mask, dtype=samples.rewards.dtype)
        columns = {"reference": zeros, "previous": zeros}
        trainer = self._made(num_updates=1, num_generations=int(sizes[0]), given_rewards=samples.rewards, columns=columns)
        scored = self._scored(trainer, samples.mask, samples.truncated, zeros)
        found: Tensor = scored["advantages"]
        return found

    def loss(self, update: Update) -> tuple[Tensor, Metrics]:
        """TRL's loss of one optimizer step."""
        width = update.mask.shape[1]
        columns = {name: getattr(update, name) for name in ("logprobs", "previous", "reference", "entropies")}
        trainer = self._made(
            num_updates=update.num_updates,
            num_generations=1,
            given_rewards=torch.zeros(len(update.mask)),
            columns={name: column.detach() if name == "previous" else column for name, column in columns.items()},
        )
        if self._is_rloo:
            return self._rloo_loss(trainer, update)
        inputs = self._scored(trainer, update.mask, update.truncated, update.generation.detach())
        assert inputs["completion_ids"].shape[1] == width
        inputs["advantages"] = update.advantages
        inputs["num_items_in_batch"] = torch.tensor(float(update.num_step_tokens))
        value = trainer._compute_loss("policy", inputs)
        return value, _means(trainer)

    def _rloo_loss(self, trainer: Any, update: Update) -> tuple[Tensor, Metrics]:
        mask = update.mask.to(update.logprobs.dtype)
        # One advantage a sequence, whose derivative is spread over its tokens.
        advantages = (update.advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        given = torch.ones(len(mask), 1, dtype=torch.int64)
        inputs = {"prompt_ids": given, "prompt_mask": given, "completion_ids": mask.long(), "completion_mask": mask}
        inputs |= {"advantages": advantages, "old_logps": (update.previous * mask).sum(1).detach()}
        value = trainer._compute_loss("policy", inputs)
        return value, _means(trainer)


def peer(setup: Setup) -> Peer:
    """TRL, as it is installed."""
    found = Trl(setup)
    base = found._base.__name__
    names = dict(METRICS)
    if "sequence" in str(found.settings.get("vllm_importance_sampling_mode")):
        names.pop("sampling/importance_sampling_ratio/mean")
    return found.peer([f"trl.{base}._generate_and_score_completions", f"trl.{base}._compute_loss"], names)


def _means(trainer: Any) -> dict[str, float]:
    """The metrics that the trainer has collected."""
    return {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items() if values}
