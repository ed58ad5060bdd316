"""Faults of one line, planted between the parts of a run, each with a test that must fail with it.

What each part does is tested beside it; these faults leave every part plausible and make the whole train on something else.
"""

from attrs import frozen

ORACLE = "tests/oracle/test_grpo_oracle.py::test_one_rank[{}]"
WITH_KL = ORACLE.format("fsdp2-4-updates-trainer-kl-whole")
WITHOUT_KL = ORACLE.format("fsdp2-4-updates-trainer-no-kl-whole")
GOING_ON = "tests/oracle/test_stale_samples.py::test_samples_that_go_on_behind_an_update[fsdp2-1-updates-{}]"
STOPPED = "tests/oracle/test_stale_samples.py::test_a_generator_that_is_stopped_beside_the_trainer"
AGENTS_AHEAD = "tests/system/test_agents_ahead.py::test_each_token_has_the_log_probability_of_the_weights_that_it_names[{}]"
LORA = "tests/system/test_lora.py::test_adapters_reach_the_generator_and_the_disk[{}]"
KL_IN_REWARDS = (
    "tests/system/test_kl_in_rewards.py::test_advantages_are_rewards_less_the_divergence_from_the_initial_model_to_go"
)
PPO = "tests/oracle/test_ppo_oracle.py::test_policy_and_critic_are_those_of_the_formulas[fsdp2]"
MARGINS = "tests/system/test_reward_models.py::test_a_reward_model_learns_as_an_independent_computation_does[{}]"
MIXED_SFT = "tests/system/test_mixed_data.py::test_demonstrations_are_mixed"
GUESSED = (
    "tests/vllm_generation/test_speculation.py::test_tokens_are_of_the_models_distribution_whatever_is_guessed[ngram-top_k]"
)
LATENT = "tests/megatron_backend/test_latent_attention.py::test_log_probabilities_and_gradients_are_those_of_transformers[{}]"
GENERAL = "tests/megatron_backend/test_attention.py::test_windows_sinks_caps_and_the_scale_of_scores_are_those_of_the_model[{}]"
TEACHER_APART = "tests/system/test_distillation.py::test_the_loss_sees_the_teachers_log_probabilities[megatron-apart]"
ASKED_OF_ENDPOINTS = "tests/openai_generation/test_backend.py::test_what_is_asked_for"
UPDATES = "tests/core/run/test_loop.py"
ANY_ORDER = "tests/core/run/rollout/test_groups_in_any_order.py"
TWO_PARTS = "tests/core/run/execution/ray/test_dispatch.py::test_images_go_with_their_sequences_and_prompts"
IMAGE_STEPS = "tests/fsdp2_backend/test_backend_images.py::test_three_steps_and_what_they_leave[qwen3_vl-none]"
IMAGE_ROWS = "tests/core/run/data/test_row_images.py"
LOOP, TRAINER = "rlcore.run.loop", "rlcore.run.execution.groups"


@frozen
class Fault:
    """One line of a module replaced by another."""

    name: str
    module: str
    line: str
    """Occurs once in the module, without its indentation."""
    planted: str
    killer: str
    """The test that must fail, as pytest names it."""


FAULTS = (
    # The loop
    Fault(
        "later updates are declared to be first ones",
        LOOP,
        'later = evolve(loss, token_columns=tuple(dict.fromkeys(columns)), previous_logprobs="given")',
        'later = evolve(loss, token_columns=tuple(dict.fromkeys(columns)), previous_logprobs="unchanged")',
        WITH_KL,
    ),
    Fault(
        "the column of the previous log-probabilities is dropped",
        LOOP,
        "columns.append(spi.PREVIOUS_LOGPROBS)",
        "pass",
        WITH_KL,
    ),
    Fault(
        "the previous log-probabilities are the reference's",
        LOOP,
        'wanted.append(LogprobsColumn(name=spi.PREVIOUS_LOGPROBS, model="policy", first=1))',
        'wanted.append(LogprobsColumn(name=spi.PREVIOUS_LOGPROBS, model="reference", first=1))',
        WITH_KL,
    ),
    Fault(
        "the reference is the policy at the start of the step",
        LOOP,
        'wanted.append(LogprobsColumn(name=spi.REFERENCE_LOGPROBS, model="reference"))',
        'wanted.append(LogprobsColumn(name=spi.REFERENCE_LOGPROBS, model="policy"))',
        WITH_KL,
    ),
    Fault(
        "a minibatch is trained on twice, the last one never",
        LOOP,
        "found = [evolve(minibatch, batch=batch) for minibatch in minibatches]",
        "found = [evolve(minibatch, batch=batch) for minibatch in [minibatches[0], *minibatches[:-1]]]",
        WITH_KL,
    ),
    Fault(
        "minibatches cut groups apart",
        LOOP,
        "return [np.flatnonzero(np.isin(groups, group_ids)) for group_ids in np.array_split(order, num_updates)]",
        "return [np.sort(part) for part in np.array_split(random.permutation(batch.num_sequences), num_updates)]",
        WITH_KL,
    ),
    Fault(
        "every step's minibatches are shuffled alike",
        LOOP,
        "random = np.random.default_rng([self.recipe.run.seed, Stream.MINIBATCHES, step])",
        "random = np.random.default_rng([self.recipe.run.seed, Stream.MINIBATCHES, 1])",
        WITH_KL,
    ),
    Fault(
        "updates without a signal are made",
        LOOP,
        "if counted[sequences].any()",
        "if num_loss_tokens[sequences].any()",
        WITHOUT_KL,
    ),
    Fault(
        "the schedule is a step ahead",
        LOOP,
        "batch, planned = training.batch, (step - 1 - num_warmup_steps) * self.recipe.training.updates_per_step",
        "batch, planned = training.batch, step * self.recipe.training.updates_per_step",
        WITH_KL,
    ),
    Fault(
        "the generator is refitted once",
        "rlcore.run.execution.refit",
        "if self.version == weight_version:",
        "if self.version >= 0:",
        WITH_KL,
    ),
    # What a step is made of
    Fault(
        "the policy trains on the held-out rows",
        "rlcore.run.plan.inputs",
        'train_sets = data_sets(prepared, "train")',
        'train_sets = data_sets(prepared, "evaluation")',
        "tests/core/run/rollout/test_sources.py::test_training_and_evaluation_see_their_own_rows_alone",
    ),
    Fault(
        "training samples at the evaluation's temperature",
        "rlcore.run.rollout.from_recipe",
        "rollout, options = recipe.rollout, recipe.rollout if trains else recipe.evaluation",
        "rollout, options = recipe.rollout, recipe.evaluation",
        WITH_KL,
    ),
    Fault(
        "every step draws the same samples",
        "rlcore.run.rollout.sources",
        "draws=Draws((self._seed, Stream.ROLLOUTS, step + 1), len(indices), self._collector.samples_per_prompt),",
        "draws=Draws((self._seed, Stream.ROLLOUTS), len(indices), self._collector.samples_per_prompt),",
        "tests/core/run/rollout/test_sources.py::test_no_two_steps_draw_alike",
    ),
    Fault(
        "every step takes the same prompts",
        "rlcore.run.rollout.sources",
        "indices = self._kept[self._stream.indices(step)]",
        "indices = self._kept[self._stream.indices(0)]",
        "tests/core/run/rollout/test_sources.py::test_no_two_steps_draw_alike",
    ),
    Fault(
        "groups are dealt out sample by sample",
        "rlcore.run.rollout.collector",
        "sequence_columns={spi.GROUP_IDS: np.repeat(np.arange(len(groups), dtype=np.int32), self.samples_per_prompt)},",
        "sequence_columns={spi.GROUP_IDS: np.sort(np.arange(len(valid), dtype=np.int32) % 7 % len(groups))},",
        WITH_KL,
    ),
    Fault(
        "a sample gets its neighbour's reward",
        "rlcore.run.rollout.collector",
        "rewards=np.where(valid, rewards, 0.0).astype(np.float32),",
        "rewards=np.roll(np.where(valid, rewards, 0.0), 1).astype(np.float32),",
        WITH_KL,
    ),
    Fault(
        "the prompt takes part in the loss",
        "rlcore.run.rollout.collector",
        "loss_mask = versions != NOT_GENERATED",
        "loss_mask = np.diff(np.r_[-1, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))]) == 0",
        WITH_KL,
    ),
    # Samples of several versions
    Fault(
        "a version's span begins a token early",
        "rlcore.run.rollout.collector",
        "spi.WEIGHT_VERSIONS: versions,",
        "spi.WEIGHT_VERSIONS: np.where(loss_mask, np.maximum(versions, np.r_[versions[1:], versions[-1:]]), versions),",
        GOING_ON.format("trainer-kl-whole-1-behind-wait"),
    ),
    Fault(
        "tokens that vLLM says with new weights read what it computed with the old ones",
        "rlcore_vllm.engine",
        "versions.drop_caches(self._core)",
        "pass",
        "tests/vllm_generation/test_backend.py::test_a_refit_in_flight_parts_each_sample_by_its_weights",
    ),
    Fault(
        "vLLM holds routers in 8 bits",
        "rlcore_vllm.settings",
        '"quantization_config": {"ignore": [ROUTERS]}}',
        "}",
        "tests/vllm_generation/test_float8_weights.py::test_each_refit_is_quantised_anew",
    ),
    Fault(
        "a sample goes on behind its prompt, not behind what it has said",
        "rlcore.run.rollout.turns",
        "prompt=episode.context(),",
        "prompt=episode.tokens[0],",
        GOING_ON.format("trainer-kl-whole-1-behind-wait"),
    ),
    Fault(
        "what went on with new weights counts as of the old ones",
        "rlcore.run.rollout.episode",
        "self._append(sampled.tokens, sampled.logprobs, sampled.weight_versions)",
        "self._append(sampled.tokens, sampled.logprobs, sampled.weight_versions - bool(self.begun))",
        GOING_ON.format("trainer-kl-whole-1-behind-wait"),
    ),
    Fault(
        "an agent's answer goes on behind its prompt, not behind what it has said",
        "rlcore.run.rollout.session_sampler",
        "prompt=np.concatenate([request.prompt, *(part.tokens for part in said)]) if said else request.prompt,",
        "prompt=request.prompt,",
        AGENTS_AHEAD.format("function"),
    ),
    Fault(
        "what an agent's answer went on with counts as of the old weights",
        "rlcore.run.rollout.session_sampler",
        "weight_versions=versions,",
        "weight_versions=np.full_like(versions, versions[0]),",
        AGENTS_AHEAD.format("function"),
    ),
    Fault(
        "weights change under a generator that is not stopped for it",
        LOOP,
        "self.source.make_way()",
        "pass",
        STOPPED,
    ),
    Fault(
        "tokens beyond the bound keep the generator's log-probabilities",
        "rlcore.run.train_step.rescoring",
        "batch = batch.with_token_column(GENERATION_LOGPROBS, np.where(is_old, present, generated))",
        "assert len(present) == len(generated)",
        GOING_ON.format("generation-kl-whole-1-behind-rescore"),
    ),
    Fault(
        "groups are trained on a step beyond their bound",
        "rlcore.run.rollout.schedule",
        "last = at.trained + later - policy.max_staleness",
        "last = at.trained + later - policy.max_staleness - 1",
        "tests/core/run/rollout/test_schedule.py",
    ),
    Fault(
        "a refit may come before the generator has begun a stream",
        "rlcore.run.rollout.background_stream",
        "self._feed.looked_at.wait()",
        "pass",
        "tests/core/run/rollout/test_background_stream.py::test_it_has_begun_once_the_generator_is_at_it",
    ),
    Fault(
        "what goes on waits behind what has not begun",
        "rlcore.run.rollout.request_feed",
        "self._waiting.sort(key=lambda wanted: not wanted.goes_on)",
        "pass",
        "tests/core/run/rollout/test_request_feed.py::test_what_goes_on_comes_before_what_has_not_begun_in_the_next_stream",
    ),
    # The trainer as the loop sees it
    Fault(
        "a minibatch is divided by the whole step's counts",
        TRAINER,
        "counts=minibatch.counts,",
        "counts=minibatch.batch.counts(),",
        WITH_KL,
    ),
    Fault(
        "log-probabilities come back in the batch's order instead of the microbatches'",
        TRAINER,
        "return put_rows(found, batch.offsets, np.concatenate(plan))",
        "return put_rows(found, batch.offsets, sequences)",
        WITH_KL,
    ),
    Fault(
        "the last microbatch of an update is left out",
        TRAINER,
        "result = self.handle.train_step(evolve(request, microbatches=_cut(batch, plan)))",
        "result = self.handle.train_step(evolve(request, microbatches=_cut(batch, plan)[:-1]))",
        WITH_KL,
    ),
    Fault(
        "the trainer's place in the schedule is the number of updates made",
        TRAINER,
        "schedule_step=minibatch.schedule_step if self.has(spi.capabilities.SCHEDULE_STEP) else weight_version,",
        "schedule_step=weight_version,",
        WITHOUT_KL,
    ),
    Fault(
        "the trainer computes at temperature 1",
        "rlcore.run.execution.in_process",
        "temperature=prepared.recipe.rollout.temperature,",
        "temperature=1.0,",
        WITH_KL,
    ),
    # Several ranks
    Fault(
        "ranks divide by the counts of one sequence",
        "rlcore.run.execution.ray.pool_groups",
        "given = [(self.model, request, *parts[rank], rank in leaders) for rank in sorted(parts)]",
        "given = [(self.model, evolve(request, counts=batch.select(sequences[:1]).counts()), *parts[r], True) for r in parts]",
        "tests/core/run/execution/ray/test_pool_groups.py::test_the_figures_are_those_of_one_process[two]",
    ),
    Fault(
        "what only keeps a rank busy counts in the loss",
        "rlcore.run.execution.ray.dispatch",
        "column[taken.offsets[filler] : taken.offsets[filler + 1]] = 0",
        "pass",
        "tests/core/run/execution/ray/test_dispatch.py",
    ),
    Fault(
        "all ranks get the first one's microbatches",
        "rlcore.run.execution.ray.dispatch",
        "return [RankPart.of(taken, self.bounds[rank * size : (rank + 1) * size + 1]) for rank in range(self.num_ranks)]",
        "return [RankPart.of(taken, self.bounds[: size + 1]) for rank in range(self.num_ranks)]",
        "tests/core/run/execution/ray/test_dispatch.py",
    ),
    Fault(
        "the two answers of a pair go to two microbatches",
        TRAINER,
        "plan = self._plan(batch, sequences, self._groups(batch, sequences))",
        "plan = self._plan(batch, sequences, None)",
        "tests/core/run/test_preferences.py::test_pairs_are_learned_and_stay_together",
    ),
    Fault(
        "half a pair keeps a rank busy",
        "rlcore.run.execution.ray.dispatch",
        "shortest = np.arange(parts[least], parts[least + 1])",
        "shortest = parts[least : least + 1]",
        "tests/core/run/execution/ray/test_dispatch.py",
    ),
    Fault(
        "the reference's log-probabilities are found by the first token alone",
        "rlcore.run.storage.reference_store",
        "digest = hashlib.blake2b(batch.tokens[tokens].tobytes(), digest_size=16)",
        "digest = hashlib.blake2b(batch.tokens[tokens][:1].tobytes(), digest_size=16)",
        "tests/core/run/storage/test_reference_store.py",
    ),
    Fault(
        "what another model computed is taken for the reference's",
        "rlcore.run.storage.reference_store",
        'return None if found == [(identity,)] else "is of another model or trainer, or of other options of it"',
        "return None",
        "tests/core/run/storage/test_reference_store.py",
    ),
    # The handles
    Fault(
        "a trainer's version is not followed",
        "rlcore.registry.trainer_handle",
        "_check_version(result.weight_version, request.weight_version + 1)",
        "pass",
        "tests/core/registry/test_trainer_handle.py",
    ),
    Fault(
        "digests are acknowledged unseen",
        "rlcore.registry.generator_handle",
        "compare_digests(request.weights.specs, sent, result.digests)",
        "pass",
        "tests/core/registry/test_generator_handle.py",
    ),
    # What torch backends share
    Fault(
        "the loss compares the policy with itself",
        "rlcore_torchkit.losses",
        "previous_logprobs=None if previous is None else previous.detach(),",
        "previous_logprobs=logprobs.detach(),",
        WITH_KL,
    ),
    Fault(
        "figures are the first microbatch's",
        "rlcore_torchkit.losses",
        "sums={name: torch.stack([output.sums[name].double() for output in outputs]).sum() for name in sorted(first.sums)},",
        "sums={name: first.sums[name].double() for name in sorted(first.sums)},",
        WITH_KL,
    ),
    Fault(
        "log-probabilities stand one token too early",
        "rlcore_torchkit.logprobs",
        "aligned = [None if values is None else _align(values, predicting + 1, packed.num_tokens) for values in results]",
        "aligned = [None if values is None else _align(values, predicting, packed.num_tokens) for values in results]",
        WITH_KL,
    ),
    Fault(
        "the temperature is missing in the gradient",
        "rlcore_torchkit.logprobs",
        "upstreams = Upstream.scaled_by(-1.0 / ctx.temperature, grad_logprobs, grad_entropy, entropies)",
        "upstreams = Upstream.scaled_by(-1.0, grad_logprobs, grad_entropy, entropies)",
        WITH_KL,
    ),
    # The plugins
    Fault(
        "what adapters have learned never arrives",
        "rlcore_fsdp2.export",
        "return merged(whole(weight, weight.dtype, device), a, b, lora.scale).to(dtype)",
        "return whole(weight, dtype, device)",
        LORA.format("fsdp2-transformers-merged"),
    ),
    Fault(
        "what megatron's adapters have learned never arrives",
        "rlcore_megatron.export",
        'return model.adapters.merged(item.tensor.name, share) if self._merges and hasattr(model, "adapters") else share',
        "return share",
        LORA.format("megatron-transformers-merged"),
    ),
    Fault(
        "adapters are merged without their scale",
        "rlcore_fsdp2.export",
        "return merged(whole(weight, weight.dtype, device), a, b, lora.scale).to(dtype)",
        "return merged(whole(weight, weight.dtype, device), a, b, 1.0).to(dtype)",
        LORA.format("fsdp2-transformers-merged"),
    ),
    Fault(
        "adapters that travel alone never arrive",
        "rlcore_vllm.weight_transfer",
        "if lora is not None:",
        "if lora is not None and self._announced().has_weights:",
        LORA.format("fsdp2-vllm-auto"),
    ),
    Fault(
        "adapters arrive at the layer below",
        "rlcore_vllm.adapters",
        'tensors={f"{PREFIX}{name}": tensor for',
        'tensors={f"{PREFIX}{name}".replace("layers.1", "layers.0"): tensor for',
        LORA.format("fsdp2-vllm-auto"),
    ),
    Fault(
        "vLLM adds adapters without their scale",
        "rlcore_vllm.adapters",
        "lora_alpha=spec.alpha,",
        "lora_alpha=spec.rank,",
        LORA.format("fsdp2-vllm-auto"),
    ),
    Fault(
        "the generator merges adapters without their scale",
        "rlcore_transformers.weights",
        "b.float(), lora.scale)",
        "b.float(), 1.0)",
        LORA.format("fsdp2-transformers-auto"),
    ),
    Fault(
        "the reference has the policy's adapters",
        "rlcore_fsdp2.adapters",
        "if not self._on:",
        "if False:",
        LORA.format("fsdp2-transformers-merged"),
    ),
    Fault(
        "the rate is read at the weights' version",
        "rlcore_fsdp2.backend",
        "rate = self._context.learning_rate(schedule_step)",
        "rate = self._context.learning_rate(self._weight_version)",
        WITHOUT_KL,
    ),
    Fault(
        "vectors decay too",
        "rlcore_fsdp2.optimizer",
        '{"params": members, "weight_decay": spec.weight_decay if decays else 0.0}',
        '{"params": members, "weight_decay": spec.weight_decay}',
        WITH_KL,
    ),
    Fault(
        "gradients are never clipped",
        "rlcore_fsdp2.optimizer",
        "if 0.0 < max_norm < norm:",
        "if 0.0 < norm < max_norm:",
        WITH_KL,
    ),
    Fault(
        "advantages are divided by the standard deviation of the population",
        "rlcore_torchkit.rl.advantages",
        "std = np.sqrt(np.add.reduceat(centred**2, starts) / others)",
        "std = np.sqrt(np.add.reduceat(centred**2, starts) / sizes)",
        WITH_KL,
    ),
    Fault(
        "the divergence that rewards lose is that of the reference from the policy",
        "rlcore_grpo.shaped_rewards",
        "policy, reference = batch.token_columns[spi.GENERATION_LOGPROBS], batch.token_columns[spi.REFERENCE_LOGPROBS]",
        "reference, policy = batch.token_columns[spi.GENERATION_LOGPROBS], batch.token_columns[spi.REFERENCE_LOGPROBS]",
        KL_IN_REWARDS,
    ),
    Fault(
        "a token does not answer for its own divergence",
        "rlcore_torchkit.rl.shaping",
        "to_go: Float64Array = before[ends] - before[:-1]",
        "to_go: Float64Array = before[ends] - before[1:]",
        KL_IN_REWARDS,
    ),
    Fault(
        "the reference that rewards are pulled to is the sampler",
        "rlcore_grpo.shaped_rewards",
        "return np.where(batch.loss_mask, kl_estimates(policy, reference, estimator=config.kl_estimator), 0.0)",
        "return np.where(batch.loss_mask, kl_estimates(policy, policy, estimator=config.kl_estimator), 0.0)",
        KL_IN_REWARDS,
    ),
    Fault(
        "the pull is away from the sampler instead of the reference",
        "rlcore_grpo.loss",
        "reference = masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)",
        "reference = generation",
        WITH_KL,
    ),
    Fault(
        "the importance weight is upside down",
        "rlcore_grpo.importance",
        "return importance_ratio(previous, generation)",
        "return importance_ratio(generation, previous)",
        ORACLE.format("fsdp2-4-updates-trainer-no-kl-top-p"),
    ),
    Fault(
        "the sampler reports log-probabilities without the temperature",
        "rlcore_transformers.sampling",
        "return tokens, _pick(probabilities, tokens).log()",
        "return tokens, _pick(logits, tokens) - logits.logsumexp(-1)",
        WITH_KL,
    ),
    Fault(
        "a position's draw depends on the seed alone",
        "rlcore_transformers.sampling",
        "mixed = splitmix64(splitmix64(seeds.astype(np.uint64)) + positions.astype(np.uint64))",
        "mixed = splitmix64(splitmix64(seeds.astype(np.uint64)) + 0 * positions.astype(np.uint64))",
        "tests/transformers_generation/test_sampling.py",
    ),
    # A critic, a model of rewards, kept tokens, several data sets
    Fault(
        "a token's value is the one after it",
        "rlcore_ppo.loss",
        "values, previous = (masked(held.roll(1), inputs) for held in (inputs.values, inputs.token_columns[VALUES]))",
        "values, previous = (masked(held, inputs) for held in (inputs.values, inputs.token_columns[VALUES]))",
        PPO,
    ),
    Fault(
        "the critic's warm-up counts nothing in its schedule",
        "rlcore.run.execution.critic",
        "planned = minibatch.schedule_step + self.num_warmup_updates",
        "planned = minibatch.schedule_step",
        PPO,
    ),
    Fault(
        "no episode was cut off",
        "rlcore.run.rollout.collector",
        "truncated=truncated,",
        "truncated=np.zeros_like(truncated),",
        PPO,
    ),
    Fault(
        "an answer's reward is the value before its end",
        "rlcore_reward.loss",
        "pairs = inputs.values[inputs.offsets[1:] - 1].view(-1, 2)",
        "pairs = inputs.values[inputs.offsets[1:] - 2].view(-1, 2)",
        "tests/system/test_reward_models.py::test_a_reward_model_learns_as_an_independent_computation_does[fsdp2]",
    ),
    Fault(
        "the tokens that samples were chosen among are forgotten",
        "rlcore.run.rollout.collector",
        "parts += [spi.SamplingMask.whole(first + start - end), mask]",
        "parts += [spi.SamplingMask.whole(first + start - end), spi.SamplingMask.whole(len(mask))]",
        "tests/oracle/test_grpo_oracle.py::test_truncated_sampling[fsdp2-1-updates-generation-kl-top-p-masked]",
    ),
    Fault(
        "ranks are not told what samples were chosen among",
        "rlcore.run.execution.ray.dispatch",
        "sampling_mask=_part_of(batch.sampling_mask, tokens),",
        "sampling_mask=None,",
        "tests/oracle/test_grpo_oracle.py::test_truncated_sampling_on_two_ranks[fsdp2-4-updates-generation-kl-top-p-masked-two-ranks]",
    ),
    Fault(
        "every row of a mix has the first environment",
        "rlcore.run.plan.mixed_environment",
        "return self.of_set.get(str(row.get(DATA_SET)), next(iter(self.backends)))",
        "return next(iter(self.backends))",
        "tests/system/test_mixed_data.py::test_each_set_has_its_share_and_its_environment",
    ),
    Fault(
        "a resumed run's reference is the model without the adapters that it began with",
        "rlcore_fsdp2.backend",
        "self.adapters.begun = load_reference(request.directory)",
        "pass",
        "tests/system/test_lora.py::test_a_run_begins_with_the_adapters_of_another[fsdp2]",
    ),
    Fault(
        "no pair is told by how much it is better",
        "rlcore.run.data.examples",
        "if examples.margins is not None:",
        "if False:",
        MARGINS.format("fsdp2-margins"),
    ),
    Fault(
        "margins are those of the data's first rows",
        "rlcore.run.data.examples",
        "columns[spi.MARGINS] = np.repeat(examples.margins[indices], counts)",
        "columns[spi.MARGINS] = np.repeat(examples.margins[: len(indices)], counts)",
        MARGINS.format("fsdp2-margins"),
    ),
    Fault(
        "ranks get the smallest margins first",
        "rlcore.run.execution.ray.dispatch",
        "sequence_columns={name: column[sequences] for name, column in batch.sequence_columns.items()},",
        "sequence_columns={name: np.sort(column)[sequences] for name, column in batch.sequence_columns.items()},",
        MARGINS.format("fsdp2-two-margins"),
    ),
    Fault(
        "a step's rows count for the sets of the next step's",
        "rlcore.run.rollout.sources",
        "return () if self.names_of is None else self.names_of(self.examples.rows[self.stream.indices(step - 1)])",
        "return () if self.names_of is None else self.names_of(self.examples.rows[self.stream.indices(step)])",
        MIXED_SFT,
    ),
    Fault(
        "rows that are left out move the others into another set",
        "rlcore.run.rollout.sources",
        "return () if self.names_of is None else self.names_of(self.examples.rows[self.stream.indices(step - 1)])",
        "return () if self.names_of is None else self.names_of(self.stream.indices(step - 1))",
        MIXED_SFT,
    ),
    Fault(
        "demonstrations of a mix are of no set",
        "rlcore.run.plan.inputs",
        "names_of = rows.names_of if isinstance(rows, MixedRows) else None",
        "names_of = None",
        MIXED_SFT,
    ),
    Fault(
        "vLLM is not told to guess",
        "rlcore_vllm.settings",
        "arguments |= speculative_arguments(config, device)",
        "pass",
        GUESSED,
    ),
    Fault(
        "guesses are as long as they were found",
        "rlcore_vllm.whole_guesses",
        "return filled, torch.where(has_sampled, torch.full_like(num_valid, drafts.shape[1]), num_valid)",
        "return filled, num_valid",
        "tests/vllm_generation/test_whole_guesses.py::test_what_is_not_guessed_is_the_last_token_again_and_counts_where_the_prompt_is_through",
    ),
    Fault(
        "guesses on a CPU are judged by memory that nothing was written to",
        "rlcore_vllm.environment",
        "versions.judge_guesses_on_cpu()",
        "pass",
        GUESSED,
    ),
    Fault(
        "a model drafts with weights that are made up",
        "rlcore_vllm.environment",
        "versions.read_drafters_weights()",
        "pass",
        GUESSED.replace("ngram", "draft_model"),
    ),
    Fault(
        "what was guessed before an earlier refit is counted again",
        "rlcore_vllm.draft_counter",
        "found, self._found = self._found, DraftCounts()",
        "found = self._found",
        GUESSED,
    ),
    Fault(
        "what was guessed in one step is told in every later one",
        "rlcore.run.execution.refit",
        "drafts, self.drafts = self.drafts, None",
        "drafts = self.drafts",
        "tests/core/run/execution/test_refit.py::test_what_was_guessed_is_told_once",
    ),
    Fault(
        "graphs are captured for one token of each sequence",
        "rlcore_vllm.settings",
        "capture_sizes(config.max_num_seqs, 1 + num_guessed(config))",
        "capture_sizes(config.max_num_seqs)",
        "tests/vllm_generation/test_speculation.py::test_graphs_are_captured_for_the_tokens_of_a_step",
    ),
    Fault(
        "vLLM keeps weights as they are where 8 bits are asked for",
        "rlcore_vllm.settings",
        'if config.quantization != "none":',
        "if False:",
        "tests/vllm_generation/test_float8_weights.py::test_each_refit_is_quantised_anew",
    ),
    # Images
    Fault(
        "a row's images end at the template",
        "rlcore.run.rollout.group_starts",
        "images = prompt_images(reset.observation.messages)",
        "images = prompt_images(None)",
        ANY_ORDER,
    ),
    Fault(
        "an episode forgets its images",
        "rlcore.run.rollout.episode",
        "images=self.images,",
        "images=(),",
        ANY_ORDER,
    ),
    Fault(
        "a turn is asked for without its images",
        "rlcore.run.rollout.turns",
        "images=episode.images,",
        "images=(),",
        ANY_ORDER,
    ),
    Fault(
        "prompts of a request have each other's images",
        "rlcore.run.rollout.request_feed",
        "images = tuple(shared[0].images for shared in samples)",
        "images = tuple(shared[0].images for shared in samples[::-1])",
        ANY_ORDER,
    ),
    Fault(
        "samples are trained on with each other's images",
        "rlcore.run.rollout.collector",
        "images=tuple(one.images for one in episodes)",
        "images=tuple(one.images for one in episodes[::-1])",
        ANY_ORDER,
    ),
    Fault(
        "microbatches have the batch's first images",
        "rlcore.spi.batch",
        "tuple(self.images[index] for index in indices.tolist())",
        "self.images[: len(indices)]",
        IMAGE_STEPS,
    ),
    Fault(
        "a rank's microbatches have its first images",
        "rlcore.run.execution.ray.dispatch",
        "images=None if self.images is None else self.images[start:end],",
        "images=None if self.images is None else self.images[: end - start],",
        TWO_PARTS,
    ),
    Fault(
        "every rank has the first one's images",
        "rlcore.run.execution.ray.dispatch",
        "images=None if batch.images is None else batch.images[sequences],",
        "images=None if batch.images is None else batch.images[: sequences.stop - sequences.start],",
        TWO_PARTS,
    ),
    Fault(
        "a generator's share of prompts has the request's first images",
        "rlcore.run.execution.ray.dispatch",
        "tuple(request.images[prompt] for prompt in prompts.tolist())",
        "request.images[: len(prompts)]",
        TWO_PARTS,
    ),
    Fault(
        "an engine's prompts have the request's first images",
        "rlcore_vllm.dealing",
        "tuple(request.images[prompt] for prompt in prompts.tolist())",
        "request.images[: len(prompts)]",
        "tests/vllm_generation/test_dealing.py",
    ),
    Fault(
        "a reference is asked ahead without images",
        "rlcore.run.train_step.reference_ahead",
        "tuple(images for _, images in taken)",
        "tuple(() for _ in taken)",
        "tests/core/run/train_step/test_reference_ahead.py",
    ),
    Fault(
        "the reference's log-probabilities are found whatever the images",
        "rlcore.run.storage.reference_store",
        "digest.update(hashlib.sha256(file).digest())",
        "pass",
        "tests/core/run/storage/test_reference_store.py",
    ),
    Fault(
        "demonstrations have each other's images",
        "rlcore.run.data.examples",
        "tuple(examples.images[index] for index in sequences.tolist())",
        "examples.images[: len(sequences)]",
        IMAGE_ROWS,
    ),
    Fault(
        "a chat's images end with its first answer",
        "rlcore.run.data.learned_chats",
        "images=images,",
        "images=before.images,",
        IMAGE_ROWS,
    ),
    Fault(
        "the loss reads no images",
        "rlcore_fsdp2.gradients",
        "images=batch.images,",
        "images=None,",
        IMAGE_STEPS,
    ),
    Fault(
        "log-probabilities are of the text alone",
        "rlcore_fsdp2.logprobs",
        "images=microbatch.images,",
        "images=None,",
        "tests/fsdp2_backend/test_backend_images.py::test_packed_is_as_alone[qwen3_vl]",
    ),
    Fault(
        "images stand in whatever placeholders there are",
        "rlcore_torchkit.image_forward",
        "if rows != wanted:",
        "if sum(rows) < sum(wanted):",
        "tests/torchkit/test_image_forward.py",
    ),
    Fault(
        "images that occur again come first",
        "rlcore_torchkit.image_forward",
        "torch.cat([parts[file][0] for file in files])",
        "torch.cat([parts[file][0] for file in sorted(files)])",
        "tests/torchkit/test_image_forward.py",
    ),
    # A reference on devices of its own
    Fault(
        "what a reference is asked ahead is another sample's",
        "rlcore.run.train_step.reference_ahead",
        "for key, values in zip(taken, np.split(found, ends[:-1]), strict=True):",
        "for key, values in zip(taken, map(np.resize, np.split(found, ends[:-1])[::-1], np.diff(ends, prepend=0))):",
        "tests/core/run/train_step/test_reference_ahead.py",
    ),
    Fault(
        "a teacher's ranks have the student's layout",
        "rlcore.run.execution.ray.pool",
        "trainer_config=prepared.reference_config,",
        'trainer_config=prepared.config("trainer"),',
        TEACHER_APART,
    ),
    Fault(
        "ranks compute at temperature 1",
        "rlcore.run.execution.ray.pool",
        "temperature=prepared.recipe.rollout.temperature,",
        "temperature=1.0,",
        TEACHER_APART,
    ),
    # Families that Megatron alone computes
    Fault(
        "experts are chosen without the biases of the checkpoint",
        "rlcore_megatron.load",
        "if view.numel():",
        "if view.numel() and source.tensors[0].dtype is None:",
        LATENT.format("one group"),
    ),
    Fault(
        "what experts add is not scaled",
        "rlcore_megatron.families.deepseek_v3",
        '"moe_router_topk_scaling_factor": own["routed_scaling_factor"],',
        '"moe_router_topk_scaling_factor": 1.0,',
        LATENT.format("one group"),
    ),
    Fault(
        "attention of far tokens is not sharpened",
        "rlcore_megatron.families.deepseek_v3",
        '"mscale_all_dim": float(rope["mscale_all_dim"]),',
        '"mscale_all_dim": 0.0,',
        LATENT.format("one group"),
    ),
    Fault(
        "all layers have the first one's window",
        "rlcore_megatron.attention",
        "self._window = family.windows[self._layer_number - 1] if family.windows else None",
        "self._window = family.windows[0] if family.windows else None",
        GENERAL.format("gpt_oss"),
    ),
    Fault(
        "sinks are read and never attended to",
        "rlcore_megatron.attention",
        '"s_aux": sinks}',
        '"s_aux": None}',
        GENERAL.format("gpt_oss"),
    ),
    Fault(
        "yarn scales the angles of general attention alone",
        "rlcore_megatron.attention",
        "self._scale = scale",
        "pass",
        GENERAL.format("gpt_oss"),
    ),
    Fault(
        "scores are not capped",
        "rlcore_megatron.attention",
        "self._cap = family.score_cap",
        "self._cap = None",
        GENERAL.format("gemma2"),
    ),
    Fault(
        "all layers are rotated by one base",
        "rlcore_megatron.model",
        "if windows[layer.layer_number - 1] is not None:",
        "if not windows:",
        GENERAL.format("gemma3_text"),
    ),
    Fault(
        "embeddings are not scaled",
        "rlcore_megatron.model",
        "return embeddings * scale",
        "return embeddings",
        GENERAL.format("gemma3_text"),
    ),
    Fault(
        "gradients pass caps of logits as if there were none",
        "rlcore_torchkit.logprobs",
        "slopes = None if ctx.cap is None else cap_slopes(logits, ctx.cap)",
        "slopes = None",
        "tests/torchkit/test_logprobs.py::test_values_and_gradients_equal_float64",
    ),
    # Heads that tensor ranks share, endpoints, chat templates
    Fault(
        "ranks that share a head take their own gradient for that of all",
        "rlcore_fsdp2.tensor_parallel",
        "part = _local_part(name, Partial(), module)",
        "part = _local_part(name, Replicate(), module)",
        "tests/fsdp2_backend/test_tensor_parallel.py::test_ranks_that_share_a_head_compute_it_each_and_their_gradients_are_added_up",
    ),
    Fault(
        "endpoints sample with the default parameters",
        "rlcore_openai.samples",
        "sampling=request.sampling,",
        "sampling=SamplingParams(),",
        ASKED_OF_ENDPOINTS,
    ),
    Fault(
        "endpoints are not told the model",
        "rlcore_openai.endpoint",
        "json=wanted.body(self.model)",
        'json=wanted.body("")',
        ASKED_OF_ENDPOINTS,
    ),
    Fault(
        "endpoints are shown the key for their list of models alone",
        "rlcore_openai.endpoint",
        'headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}',
        'headers = {"Authorization": f"Bearer {self.key}"} if self.key and method == "GET" else {}',
        ASKED_OF_ENDPOINTS,
    ),
    Fault(
        "an answer's log-probabilities belong to its last tokens first",
        "rlcore_openai.samples",
        "self.logprobs += told[: len(tokens)]",
        "self.logprobs += told[: len(tokens)][::-1]",
        "tests/openai_generation/test_samples.py::test_events_of_any_size_add_up",
    ),
    Fault(
        "an exported template has lost its variables",
        "rlcore.run.storage.saver",
        "text = with_defaults(template, model.chat_template_kwargs)",
        "text = template",
        "tests/system/test_hub.py::test_an_exported_model_tells_how_it_was_made_and_is_uploaded",
    ),
    Fault(
        "vLLM promises what guesses rule out",
        "rlcore_vllm.provider",
        "return frozenset(names) | lost_capabilities(config)",
        "return frozenset(names)",
        "tests/system/test_check.py::test_what_vllm_lacks_where_it_guesses_is_asked_of_it_in_vain",
    ),
)
