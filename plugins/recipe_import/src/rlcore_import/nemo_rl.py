"""Imports a NeMo-RL recipe (`rlcore import nemo-rl`): GRPO, distillation, SFT, DPO or a reward model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore_import.nemo_rl_data import first_sets, import_data
from rlcore_import.nemo_rl_environments import import_environment
from rlcore_import.nemo_rl_generation import import_asynchrony, import_generation
from rlcore_import.nemo_rl_keys import DROPPED, MAPPED
from rlcore_import.nemo_rl_loss import import_advantages, import_distillation, import_loss, import_preferences
from rlcore_import.nemo_rl_optimizer import import_optimizer
from rlcore_import.nemo_rl_policy import check_layout, import_cluster, import_policy
from rlcore_import.recipe import ImportedRecipe
from rlcore_import.references import resolved
from rlcore_import.source import Source
from rlcore_import.yaml_files import error, merge, read_inherited, with_overrides

KINDS: Mapping[str, str] = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "rm": "bradley_terry"}
"""rlcore's algorithm for each of NeMo-RL's tables."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"max_num_steps": 1_000_000, "val_period": 10, "max_val_samples": 256},
    "sft": {"max_num_steps": 60, "val_period": 10, "val_batches": 8, "val_global_batch_size": 32, "val_at_start": True},
    "dpo": {"max_num_steps": 150, "val_period": 25, "val_batches": 8, "val_global_batch_size": 8, "val_at_start": True},
    "rm": {"max_num_steps": -1, "val_period": 16},
}
"""NeMo-RL's values of the keys that a recipe leaves out, by table; the importer's other defaults are NeMo-RL's, too."""
DEFAULTS_OF_LOSS: Mapping[str, Any] = {"reference_policy_kl_penalty": 0.01}
OTHERS: Mapping[str, str] = {
    "ppo": "a critic has its own options: write [algorithm.ppo] and [critic]",
    "distillation": "its loss is over the teacher's likeliest tokens at each position, and [algorithm.distill] learns from one "
    "token: write [algorithm.distill] and [reference]",
}
"""NeMo-RL's tables that the importer refuses, each with the reason and the remedy."""


def import_recipe(path: Path, overrides: Sequence[str] = ()) -> ImportedRecipe:
    """Import a file of NeMo-RL's with the files that it inherits and the arguments KEY=VALUE."""
    tables = resolved(with_overrides(read_inherited(path), overrides))
    kind = _kind(path, tables)
    tables, reports = first_sets(_completed(tables, kind))
    source = Source(values=tables, mapped=MAPPED, dropped=DROPPED, reports=reports)
    values: dict[str, Any] = {"algorithm.name": KINDS[kind]}
    with source.checked():
        _run(source, values, kind)
        updates = _step(source, values) if kind == "grpo" else 1
        import_policy(source, values, kind)
        import_optimizer(source, values, updates)
        import_data(source, values, kind)
        if kind == "grpo":
            _rollouts(source, values, path)
        elif kind == "dpo":
            import_preferences(source, values)
        import_cluster(source, values, kind)
        check_layout(source, values)
    if "data.evaluation.source" not in values:
        values = {key: value for key, value in values.items() if not key.startswith("evaluation.")}
    return source.recipe(values)


def _kind(path: Path, tables: Mapping[str, Any]) -> str:
    """Return the name of the algorithm's table. ConfigError unless there is exactly one that can be imported."""
    found = [name for name in (*KINDS, *OTHERS) if tables.get(name) is not None]
    if len(found) == 1 and found[0] in KINDS and isinstance(tables.get("policy"), Mapping):
        return found[0]
    named = f"the tables {', '.join(map(str, tables)) or 'none'}" if not found else f"the table {' and '.join(found)}"
    expected = f"a recipe of NeMo-RL's with policy and one of {', '.join(KINDS)}"
    raise error(path, named, expected, "; ".join(OTHERS[name] for name in found if name in OTHERS))


def _completed(tables: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the recipe with NeMo-RL's defaults of the keys that it leaves out."""
    defaults = {kind: DEFAULTS[kind]} | ({"loss_fn": DEFAULTS_OF_LOSS} if kind == "grpo" else {})
    found = {name: tables.get(name) or {} for name in defaults}
    return {**tables, **{name: merge(defaults[name], table) for name, table in found.items() if isinstance(table, Mapping)}}


def _run(source: Source, values: dict[str, Any], kind: str) -> None:
    values["run.num_steps"] = source.integer(f"{kind}.max_num_steps", 1, least=1)
    values["run.seed"] = source.integer(f"{kind}.seed", 42, least=0)
    values["evaluation.every_n_steps"] = max(0, source.integer(f"{kind}.val_period", 0))
    values["evaluation.at_start"] = source.flag(f"{kind}.val_at_start")
    values["evaluation.at_end"] = source.flag(f"{kind}.val_at_end")
    if kind == "grpo":
        if most := source.integer("grpo.max_val_samples", least=1):
            values["evaluation.max_prompts"] = most
        values["evaluation.samples_per_prompt"] = source.integer("grpo.val_num_generations_per_prompt", 1, least=1)
    else:
        values["training.prompts_per_step"] = source.integer("policy.train_global_batch_size", 32, least=1)
        batches, size = source.integer(f"{kind}.val_batches", 0), source.integer(f"{kind}.val_global_batch_size", 0)
        if batches > 0 and size > 0:
            values["evaluation.max_prompts"] = batches * size
    saves = source.flag("checkpointing.enabled", True)
    values["checkpoint.at_end"] = saves
    every = source.integer("checkpointing.save_period", 0)
    values["checkpoint.every_n_steps"] = max(0, every) if saves else 0
    if keep := source.integer("checkpointing.keep_top_k", least=1):
        values["checkpoint.keep"] = keep
    if directory := source.text("checkpointing.checkpoint_dir"):
        folder = Path(directory)
        values["run.directory"] = str(folder.parent)
        values["run.name"] = folder.name or "run"
    if source.flag("logger.tensorboard_enabled"):
        values["sinks.names"] = ["tensorboard"]


def _step(source: Source, values: dict[str, Any]) -> int:
    """Import the prompts, samples and updates of a step; return the number of updates."""
    prompts = source.integer("grpo.num_prompts_per_step", 32, least=1)
    samples = source.integer("grpo.num_generations_per_prompt", 16, least=1)
    batch = source.integer("policy.train_global_batch_size", prompts * samples, least=1)
    updates: int = min(prompts, max(1, prompts * samples // batch))
    if prompts * samples != updates * batch:
        source.report(
            "policy.train_global_batch_size",
            f"{prompts} prompts x {samples} samples are not whole batches of it: {updates} update(s) of whole groups here",
        )
    elif batch % samples:
        source.report("policy.train_global_batch_size", f"groups of {samples} samples are not divided between updates")
    values["training.prompts_per_step"] = prompts
    values["training.minibatches_per_step"] = updates
    values["rollout.samples_per_prompt"] = samples
    return updates


def _rollouts(source: Source, values: dict[str, Any], path: Path) -> None:
    """Import the environment, the sampling and the loss of a recipe that generates."""
    import_environment(source, values, path)
    source.flag("on_policy_distillation.enabled")
    if source.look("on_policy_distillation.enabled") is True or source.look("grpo.adv_estimator.name") == "opd":
        import_distillation(source, values)
    else:
        import_advantages(source, values)
        import_loss(source, values)
        _replacement(source, values)
    if not source.flag("grpo.overlong_filtering"):
        pass
    elif values["environment.name"] == "nemo_gym":
        source.report("grpo.overlong_filtering", "agents bound their turns themselves: answers that were cut are trained on")
    else:
        values["rollout.on_truncation"] = "mask"
        if values.get("algorithm.grpo.advantage_baseline", "none") != "none":
            source.report(
                "grpo.overlong_filtering",
                "an answer that was cut leaves its group's baseline and deviation too, where there it leaves the loss alone",
            )
    turns = source.integer("grpo.max_rollout_turns", 1, least=1)
    if values["environment.name"] != "nemo_gym":  # whose agents ask as often as they like
        values["rollout.max_turns"] = turns
    import_generation(source, values)
    import_asynchrony(source, values)


def _replacement(source: Source, values: dict[str, Any]) -> None:
    """Import dynamic sampling, which needs an environment with rewards."""
    replaces = source.flag("grpo.use_dynamic_sampling")
    most = source.number("grpo.dynamic_sampling_max_gen_batches", 10.0, least=1)
    leaves_out = source.flag("grpo.use_leave_one_out_baseline", True)
    if replaces and values["environment.name"] == "unrewarded":
        source.report("grpo.use_dynamic_sampling", "no group is replaced before there are rewards")
        return
    values["rollout.dynamic_sampling"] = replaces
    if not replaces:
        return
    values["rollout.max_refill_ratio"] = max(most - 1, 0.1)
    if leaves_out:
        source.report(
            "grpo.use_leave_one_out_baseline",
            "groups are replaced whole; there a sample whose others all earned the same leaves its group by itself",
        )
