"""Imports a verl configuration (`rlcore import verl`): PPO, GRPO and related algorithms, with hydra's arguments."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore_import.hydra_files import read_hydra
from rlcore_import.recipe import ImportedRecipe
from rlcore_import.references import resolved
from rlcore_import.source import Source
from rlcore_import.verl_distillation import import_distillation, name_teachers
from rlcore_import.verl_keys import DROPPED, MAPPED, PARTIAL_SWITCHES
from rlcore_import.verl_loss import import_algorithm
from rlcore_import.verl_policy import import_generator, import_model, import_optimizer, import_trainer
from rlcore_import.verl_rows import ACTOR, ROLLOUT
from rlcore_import.yaml_files import error

TABLES = ("data", "actor_rollout_ref", "algorithm", "trainer")
REWARD_MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")


def import_recipe(path: Path, overrides: Sequence[str] = ()) -> ImportedRecipe:
    """Import a configuration of verl's with its groups and the arguments KEY=VALUE."""
    tables = resolved(read_hydra(path, overrides))
    missing = [name for name in TABLES if not isinstance(tables.get(name), Mapping)]
    if missing:
        expected = f"verl's configuration of main_ppo, with {', '.join(TABLES)}"
        remedy = "Take ppo_trainer.yaml, and write a script's arguments behind it"
        raise error(path, f"no {', '.join(missing)}", expected, remedy)
    source = Source(values=tables, mapped=MAPPED, dropped=DROPPED, partial_switches=PARTIAL_SWITCHES)
    values: dict[str, Any] = {"run.device": "cuda"}
    name_teachers(source)
    with source.checked():
        _run(source, values)
        import_model(source, values)
        _step(source, values)
        _data(source, values)
        _rewards(source, values)
        if source.flag("distillation.enabled"):
            import_distillation(source, values)
        else:
            source.ignore("distillation")
            import_algorithm(source, values)
            _overlong(source, values)
        import_optimizer(source, values)
        import_trainer(source, values)
        import_generator(source, values)
    return source.recipe(values)


def _run(source: Source, values: dict[str, Any]) -> None:
    steps = source.integer("trainer.total_training_steps", least=1)
    if steps is None:
        source.report("trainer.total_training_steps", "not set: verl counts epochs, and 100 steps are written")
    values["run.num_steps"] = steps or 100
    values["run.directory"] = f"runs/{source.text('trainer.project_name', 'verl')}"
    name = str(source.text("trainer.experiment_name", "run")).replace("/", "-")
    values["run.name"] = "run" if name in ("", ".", "..") else name
    if seed := source.integer("data.seed", least=0):
        values["run.seed"] = seed
    values["checkpoint.every_n_steps"] = max(0, source.integer("trainer.save_freq", 0))
    if keep := source.integer("trainer.max_actor_ckpt_to_keep", least=0):
        values["checkpoint.keep"] = keep
    nodes, gpus = source.integer("trainer.nnodes", 1, least=1), source.integer("trainer.n_gpus_per_node", 8, least=1)
    values |= {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus}
    if nodes > 1:
        values["cluster.address"] = "auto"  # there, too, Ray runs on every machine before the run begins
    if source.flag("trainer.val_only"):
        source.refuse("trainer.val_only", "a recipe that trains", "rlcore eval measures a model")


def _step(source: Source, values: dict[str, Any]) -> None:
    prompts, samples = source.integer("data.train_batch_size", 1024, least=1), source.integer(f"{ROLLOUT}.n", 1, least=1)
    refills = source.flag("algorithm.filter_groups.enable")
    drawn = source.integer("data.gen_batch_size", least=1)
    if drawn and not refills and not source.look("trainer.use_v1") and source.look("async_training") is None:
        prompts = drawn  # verl's older trainer draws this number and trains on all of it, unless it filters groups
    mini = source.integer(f"{ACTOR}.ppo_mini_batch_size", prompts, least=1)
    updates = max(1, prompts // mini)
    if prompts % mini:
        source.report(f"{ACTOR}.ppo_mini_batch_size", f"{prompts} prompts are not whole batches of it: {updates} update(s)")
    prompt = source.integer("data.max_prompt_length", 512, least=1)
    answer = source.integer("data.max_response_length", 512, least=1)
    values |= {
        "training.prompts_per_step": prompts,
        "training.minibatches_per_step": updates,
        "rollout.samples_per_prompt": samples,
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": answer,
    }
    for key, length in (("prompt_length", prompt), ("response_length", answer)):
        if source.integer(f"{ROLLOUT}.{key}", length) != length:
            source.report(f"{ROLLOUT}.{key}", f"data.max_{key} counts: {length}")
    longest = source.integer(f"{ROLLOUT}.max_model_len", prompt + answer)
    if longest < prompt + answer:
        source.report(f"{ROLLOUT}.max_model_len", "an answer may be as long as rollout.max_response_tokens behind any prompt")
    if refills and samples == 1:
        source.report("algorithm.filter_groups.enable", "the rewards of a group of one are always equal: none is replaced")
        refills = False
    values["rollout.dynamic_sampling"] = refills
    values["training.epochs_per_step"] = source.integer(f"{ACTOR}.ppo_epochs", 1, least=1)
    most = source.integer("algorithm.filter_groups.max_num_gen_batches", 0)
    if refills and most > 1 and source.look("trainer.use_v1"):
        what = f"verl's newer trainer replaces groups without a bound: rollout.max_refill_ratio is {most - 1} here"
        source.report("algorithm.filter_groups.max_num_gen_batches", what)
    if refills and most > 1:
        values["rollout.max_refill_ratio"] = float(most - 1)


def _data(source: Source, values: dict[str, Any]) -> None:
    drops = source.flag("data.filter_overlong_prompts")
    field = source.text("data.prompt_key", "prompt")
    for split, key, limit_key in (
        ("train", "data.train_files", "data.train_max_samples"),
        ("evaluation", "data.val_files", "data.val_max_samples"),
    ):
        files = source.take(key)
        limit = source.integer(limit_key, -1)
        files = [file for file in (files if isinstance(files, list) else [files]) if file]
        if not all(isinstance(file, str) for file in files):
            source.refuse(key, "a file, or a list of files")
        if not files:
            continue
        if len(files) > 1:
            source.report(key, "prompts come from each file alike, where there from each row: set weights in [data.train.mix]")
        sets = [""] if len(files) == 1 else [f"mix.{name}." for name in _set_names(files)]
        for within, file in zip(sets, files, strict=True):
            row = f"data.{split}.{within}"
            values |= {f"{row}source": "parquet", f"{row}path": str(file), f"{row}prompt_field": field}
        values[f"data.{split}.on_long_prompt"] = "drop" if drops else "error"
        if limit > 0 and len(files) == 1:
            values[f"data.{split}.limit"] = limit
        if limit > 0:
            source.report(limit_key, "data.*.limit takes the first rows of one file, where there a shuffle chooses of all")
    if not source.flag("data.shuffle", default=True):
        values["data.train.shuffle"] = False
    if "data.evaluation.on_long_prompt" in values:
        _evaluation(source, values)
    else:
        source.ignore("trainer.test_freq", "trainer.val_before_train", f"{ROLLOUT}.val_kwargs")


def _set_names(files: Sequence[Any]) -> list[str]:
    """Return a distinct name for each file, from the last two parts of its path."""
    names = ["_".join(re.findall(r"\w+", "/".join(Path(str(file)).with_suffix("").parts[-2:]))) for file in files]
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, 1)]


def _evaluation(source: Source, values: dict[str, Any]) -> None:
    values |= {
        "evaluation.every_n_steps": max(0, source.integer("trainer.test_freq", 0)),
        "evaluation.at_start": source.flag("trainer.val_before_train", default=True),
    }
    prefix = f"{ROLLOUT}.val_kwargs"
    samples, temperature = source.flag(f"{prefix}.do_sample"), source.number(f"{prefix}.temperature", 0.0, least=0)
    values["evaluation.temperature"] = temperature
    is_greedy = temperature == 0
    if not is_greedy and not samples:
        source.report(f"{prefix}.do_sample", f"verl's engines sample at val_kwargs.temperature all the same: {temperature:g}")
    top_k, top_p = max(0, source.integer(f"{prefix}.top_k", -1)), source.number(f"{prefix}.top_p", 1.0, above=0, most=1)
    if not is_greedy:
        values |= {"evaluation.top_k": top_k, "evaluation.top_p": top_p}
    number = source.integer(f"{prefix}.n", 1, least=1)
    values["evaluation.samples_per_prompt"] = 1 if is_greedy else number
    if is_greedy and number > 1:
        source.report(f"{prefix}.n", "greedy samples of one prompt are all the same: one is taken")


def _rewards(source: Source, values: dict[str, Any]) -> None:
    """Import the environment: a reward model, or mathematics."""
    for enable, path in (
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
        ("reward_model.enable", "reward_model.model.path"),
    ):
        if not source.flag(enable):
            source.ignore(path)
        elif (model := source.text(path)) is None:
            source.refuse(enable, f"{path}, the model that answers are scored by")
        else:
            values |= {"environment.name": "reward_model", "environment.reward_model.path": model}
            source.report(enable, "scored by a sequence classifier with one label; a generative one is the environment judge")
    if "environment.name" not in values:
        source.ignore("reward_model.model", "reward_model.max_length", "reward.reward_model")
        values["environment.name"] = "math"
        why = (
            "verl scores a row by the function of its data_source and the answer within reward_model: write a field `answer`, "
        )
        why += "whose answer in a box earns 1 by the environment math, or a function of the row"
        source.report("data.train_files", why)
    for key in REWARD_MANAGERS:
        if source.text(key, "naive") not in ("naive", "dapo"):
            source.report(key, "rewards are the environment's")


def _overlong(source: Source, values: dict[str, Any]) -> None:
    """Import DAPO's penalty of long answers, which verl's reward manager adds."""
    is_read = any(source.look(key) == "dapo" for key in REWARD_MANAGERS)
    for prefix in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        buffer = f"{prefix}.overlong_buffer_cfg"
        is_on = source.flag(f"{buffer}.enable")
        longest = source.integer(f"{prefix}.max_resp_len", values["rollout.max_response_tokens"], least=1)
        length = source.integer(f"{buffer}.len", 0, least=0)
        weight = source.number(f"{buffer}.penalty_factor", 1.0, least=0)
        if not is_on or not length or not weight:
            continue
        if not is_read or values["algorithm.name"] != "grpo":
            source.report(f"{buffer}.enable", "added by the manager dapo there, and here by algorithms that compare groups")
            continue
        values |= {
            "algorithm.grpo.length_penalty": "soft_overlong",
            "algorithm.grpo.length_penalty_buffer": min(1.0, length / values["rollout.max_response_tokens"]),
            "algorithm.grpo.length_penalty_weight": weight,
        }
        what = "weighed against rewards of 0 and 1, where verl's function for DAPO's data gives -1 and 1"
        source.report(f"{buffer}.penalty_factor", what)
        if longest != values["rollout.max_response_tokens"]:
            source.report(f"{prefix}.max_resp_len", "the penalty is over the end of rollout.max_response_tokens")
