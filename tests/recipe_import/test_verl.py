"""verl's configuration: hydra's groups, arguments behind the file, and what each key means here."""

import itertools
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.run.plan.prepare import prepare
from rlcore.schema.structure import structure
from rlcore.spi import CheckContext, ConfigError, ModelSpec
from rlcore_grpo.check import check as check_grpo
from rlcore_grpo.config import GrpoConfig
from rlcore_import.command import recipe_text
from rlcore_import.recipe import ImportedRecipe
from rlcore_import.source import UNKNOWN, UNREAD
from rlcore_import.verl import import_recipe
from rlcore_import.yaml_files import below, merge
from rlcore_ppo.check import check as check_ppo
from rlcore_ppo.config import PpoConfig

from .test_listed_keys import defaults_of
from .verl_batches import Read

FILES = {
    "ppo_trainer.yaml": """
defaults:
  - actor@actor_rollout_ref.actor: dp_actor
  - data@data: rows
  - reward_manager@reward_manager
  - _self_
actor_rollout_ref:
  model: {path: acme/small, enable_gradient_checkpointing: true, lora_rank: 0}
  rollout:
    {name: vllm, n: 1, temperature: 1.0, top_k: -1, top_p: 1, tensor_model_parallel_size: 2, val_kwargs: {do_sample: false}}
algorithm:
  {adv_estimator: gae, gamma: 1.0, lam: 0.9, use_kl_in_reward: false, norm_adv_by_std_in_grpo: true, kl_ctrl: {kl_coef: 0.001}}
critic: {optim: {lr: 2e-5}, cliprange_value: 0.5}
trainer:
  {total_epochs: 3, total_training_steps: 40, nnodes: 1, n_gpus_per_node: 8, project_name: p, experiment_name: e, test_freq: 5}
""",
    "actor/dp_actor.yaml": """
defaults:
  - ../optim@optim: fsdp
  - _self_
strategy: fsdp
ppo_mini_batch_size: 256
ppo_epochs: 1
clip_ratio: 0.2
clip_ratio_c: 3.0
loss_agg_mode: token-mean
use_kl_loss: false
kl_loss_coef: 0.002
kl_loss_type: low_var_kl
ppo_micro_batch_size_per_gpu: 4
rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}
policy_loss: {loss_mode: vanilla, clip_cov_ratio: 0.0004}
""",
    "optim/fsdp.yaml": "{lr: 1e-6, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1, lr_scheduler_type: cosine}",
    "data/rows.yaml": """
train_files: ~/data/train.parquet
val_files: ~/data/test.parquet
train_batch_size: 1024
max_prompt_length: 512
max_response_length: 1024
""",
    "reward_manager.yaml": "{source: register, name: naive}",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "config" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "config" / "ppo_trainer.yaml"


def reported(found: ImportedRecipe) -> set[str]:
    return {one.key for one in found.unmapped if one.changes_meaning}


def test_ppo_is_read_with_its_groups(config: Path, valid) -> None:
    found = import_recipe(config)
    recipe = valid(found)
    assert (recipe.algorithm.name, recipe.training.prompts_per_step, recipe.training.minibatches_per_step) == ("ppo", 1024, 4)
    loss = recipe.algorithm.options["ppo"]
    assert (loss.gae_lambda, loss.value_clip, loss.dual_clip, loss.clip_high) == (0.9, 0.5, 3.0, 0.2)
    assert recipe.critic.learning_rate == 2e-5
    assert (recipe.schedule.warmup_steps, recipe.schedule.decay) == (16, "cosine")
    assert recipe.training.max_tokens_per_microbatch == 4 * 1536
    assert recipe.evaluation.temperature == 0.0
    assert "trainer.total_epochs" in reported(found)


def test_arguments_behind_the_file(config: Path, valid) -> None:
    arguments = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.use_kl_loss=True"]
    arguments += ["actor_rollout_ref.actor.strategy=megatron", "+actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"]
    found = import_recipe(config, arguments)
    recipe = valid(found)
    assert recipe.rollout.samples_per_prompt == 5
    loss = recipe.algorithm.options["grpo"]
    assert (loss.advantage_baseline, loss.advantage_normalisation) == ("group_mean", "std")
    assert (loss.kl_coefficient, loss.kl_estimator, loss.kl_gradient, loss.kl_placement) == (0.002, "k3", "estimate", "loss")
    assert recipe.trainer.options["megatron"].tensor_parallel == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.adv_estimator=rloo", {"advantage_baseline": "leave_one_out", "advantage_normalisation": "none"}),
        (
            "algorithm.adv_estimator=reinforce_plus_plus",
            {"advantage_baseline": "none", "advantage_normalisation": "batch_whitening"},
        ),
        ("algorithm.norm_adv_by_std_in_grpo=false", {"advantage_normalisation": "none"}),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", {"loss_normalisation": "sequence"}),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", {"loss_normalisation": "constant", "constant_length": 1}),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", {"clip_low": 0.2, "clip_high": 0.28}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", {"objective": "clipped", "ratio": "sequence_token"}),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", {"objective": "clip_cov", "covariance_share": 0.0004}),
        ("algorithm.use_kl_in_reward=true", {"kl_placement": "reward_to_go", "kl_coefficient": 0.001, "kl_estimator": "k1"}),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", {"entropy_coefficient": 0.01}),
        (
            "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 2.0}",
            {"importance_correction": "token", "importance_maximum": 2.0},
        ),
    ],
)
def test_options_of_the_loss_have_their_counterparts(config: Path, valid, override: str, expected: dict[str, object]) -> None:
    overrides = ["actor_rollout_ref.rollout.n=4", *([] if "adv_estimator" in override else ["algorithm.adv_estimator=grpo"])]
    found = import_recipe(config, [*overrides, override])
    assert {key: found.values[f"algorithm.grpo.{key}"] for key in expected} == expected
    valid(found)


def test_what_would_mean_something_else_is_reported(config: Path) -> None:
    overrides = ["custom_reward_function.path=mine.py", "algorithm.adv_estimator=remax"]
    found = import_recipe(config, [*overrides, "actor_rollout_ref.rollout.brand_new=1", "fresh.section=1"])
    assert {
        "custom_reward_function.path",
        "algorithm.adv_estimator",
        "fresh.section",
    } <= reported(found)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_epochs_over_a_step_lengthen_its_schedule(config: Path, valid, estimator: str) -> None:
    """The critic has the actor's epochs where nothing else is set."""
    head = ["actor_rollout_ref.rollout.n=4", f"algorithm.adv_estimator={estimator}"]
    head += ["actor_rollout_ref.actor.optim.lr_warmup_steps=3", "critic.optim.lr_warmup_steps=3"]
    once, twice = (import_recipe(config, [*head, f"actor_rollout_ref.actor.ppo_epochs={epochs}"]) for epochs in (1, 2))
    assert [found.values["training.epochs_per_step"] for found in (once, twice)] == [1, 2]
    assert twice.values["schedule.warmup_steps"] == 2 * once.values["schedule.warmup_steps"] > 0
    assert not {one for one in reported(twice) if one.endswith("ppo_epochs")}
    valid(twice)


def test_other_epochs_of_the_critic_are_reported(config: Path) -> None:
    head = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.ppo_epochs=2"]
    assert "critic.ppo_epochs" in reported(import_recipe(config, [*head, "critic.ppo_epochs=1"]))


def test_a_group_that_is_not_there_and_other_files_are_refused(config: Path, tmp_path: Path) -> None:
    (config.parent / "data" / "rows.yaml").unlink()
    with pytest.raises(ConfigError, match="checkout"):
        import_recipe(config)
    other = tmp_path / "other.yaml"
    other.write_text("trainer: {}\n")
    with pytest.raises(ConfigError, match="main_ppo"):
        import_recipe(other)


CHOICES = (
    [
        f"algorithm.adv_estimator={one}"
        for one in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gae")
    ],
    [
        f"actor_rollout_ref.actor.policy_loss.loss_mode={one}"
        for one in ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "bypass_mode")
    ],
    [f"algorithm.use_kl_in_reward={one}" for one in (True, False)],
    [f"actor_rollout_ref.actor.use_kl_loss={one}" for one in (True, False)],
    [f"algorithm.kl_ctrl.kl_coef={one}" for one in (0, 0.01)],
    [
        "actor_rollout_ref.actor.kl_loss_coef=0",
        "actor_rollout_ref.actor.kl_loss_type=k2+",
        "actor_rollout_ref.actor.kl_loss_type=kl",
    ],
    [
        f"actor_rollout_ref.actor.loss_agg_mode={one}"
        for one in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ],
    [
        "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.clip_ratio_c=1.0",
        "actor_rollout_ref.actor.clip_ratio=0",
    ],
    [
        "algorithm.rollout_correction=null",
        *(
            f"algorithm.rollout_correction={{{one}}}"
            for one in (
                "rollout_is: token",
                "rollout_is: sequence, rollout_is_threshold: '0.5_2.0'",
                "bypass_mode: true",
                "bypass_mode: true, loss_type: reinforce, rollout_is: sequence",
                "bypass_mode: true, loss_type: reinforce",
                "rollout_rs: seq_mean_k1, rollout_rs_threshold: 1.1",
            )
        ),
    ],
    [f"actor_rollout_ref.rollout.n={one}" for one in (1, 4)],
    ["trainer.use_v1=true", "trainer.use_v1=false"],
)


@pytest.mark.parametrize("seed", range(4))
def test_every_algorithm_that_is_written_passes_the_check(config: Path, seed: int) -> None:
    """The values of each key, and what does not go together, of choices at random among all that there are."""
    chance = random.Random(seed)
    context = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=8, max_sequence_length=8)
    for _ in range(50):
        overrides = [chance.choice(choices) for choices in CHOICES]
        values = import_recipe(config, overrides).values
        section = f"algorithm.{values['algorithm.name']}"
        options = of_keys(
            {key.removeprefix(f"{section}."): one for key, one in values.items() if key.startswith(f"{section}.")}
        )
        check, options_class = (check_ppo, PpoConfig) if section.endswith("ppo") else (check_grpo, GrpoConfig)
        found, problems = structure(options, options_class, section)
        assert not problems, (overrides, problems)
        assert not check(context, found), overrides


def of_keys(keys: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        *names, last = key.split(".")
        tables = merge(tables, below(".".join(names), {last: value}))
    return tables


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """verl's own defaults, with all keys of all engines."""
    file = tmp_path_factory.mktemp("defaults") / "ppo_trainer.yaml"
    file.write_text(yaml.safe_dump(of_keys({key: values[0] for key, values in defaults_of("verl").items()})))
    return file


def test_verls_own_defaults_are_known_and_mean_the_same_but_for_a_few(whole: Path) -> None:
    found = import_recipe(whole, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"])
    assert not [one for one in found.unmapped if one.why in (UNKNOWN, UNREAD)]
    decay = "actor_rollout_ref.actor.optim.weight_decay"
    assert reported(found) == {decay, "data.train_files", "trainer.total_epochs", "trainer.total_training_steps"}


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron", "veomni", "torchtitan"])
def test_no_engine_reads_what_another_has(whole: Path, valid, strategy: str, estimator: str) -> None:
    overrides = [f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.actor.strategy={strategy}"]
    found = import_recipe(whole, [*overrides, "actor_rollout_ref.rollout.n=2"])
    assert not [one.key for one in found.unmapped if one.why in (UNKNOWN, UNREAD)]
    valid(found)


@pytest.mark.parametrize("value", [True, False, 0, "x"])
@pytest.mark.parametrize("table", ["rollout.engine_kwargs.vllm", "model.override_config"])
def test_options_that_are_passed_on_are_reported_whatever_they_are(whole: Path, table: str, value: object) -> None:
    found = import_recipe(whole, [f"+actor_rollout_ref.{table}.option={value}", f"+actor_rollout_ref.{table}.other=null"])
    assert f"actor_rollout_ref.{table}.option" in {one.key for one in found.unmapped if one.changes_meaning}
    assert f"actor_rollout_ref.{table}.other" not in reported(found)


def test_what_nobody_listed_stands_first(whole: Path) -> None:
    new = [
        "+actor_rollout_ref.rollout.brand_new=1",
        "+algorithm.rollout_correction.newer=2",
        "+actor_rollout_ref.rollout.checkpoint_engine.newer=false",
        "+transfer_queue.newer=2",
        "+skip.newer=2",
        "+distillation.teacher_models.mine.newer=2",
        "+reward_model.reward_kwargs.newest=3",
    ]
    found = import_recipe(whole, [*new, "custom_reward_function.path=mine.py"])
    assert {one.key for one in found.unmapped[: len(new)]} == {one.lstrip("+").partition("=")[0] for one in new}
    assert all(one.why == UNKNOWN and one.changes_meaning for one in found.unmapped[: len(new)])
    assert UNKNOWN not in {one.why for one in found.unmapped[len(new) :]}


@pytest.mark.parametrize("table", ["global_profiler", "actor_rollout_ref.rollout.trace"])
def test_whatever_is_logged_or_profiled_changes_nothing_that_is_trained(whole: Path, table: str) -> None:
    found = import_recipe(whole, [f"+{table}.newer=2"])
    assert [one.changes_meaning for one in found.unmapped if one.key == f"{table}.newer"] == [False]


@pytest.mark.parametrize(
    ("manager", "table"), list(itertools.product(("dapo", "naive"), ("reward.reward_kwargs", "reward_model.reward_kwargs")))
)
def test_dapos_penalty_of_long_answers_counts_with_its_manager(config: Path, valid, manager: str, table: str) -> None:
    buffer = f"{table}={{overlong_buffer_cfg: {{enable: true, len: 256, penalty_factor: 0.5, log: false}}, max_resp_len: 1024}}"
    key = "reward.reward_manager.name" if table.startswith("reward.") else "reward_model.reward_manager"
    overrides = [f"+{buffer}", f"+{key}={manager}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    found = import_recipe(config, overrides)
    loss = valid(found).algorithm.options["grpo"]
    if manager == "naive":
        assert loss.length_penalty == "none"
        assert f"{table}.overlong_buffer_cfg.enable" in reported(found)
    else:
        assert (loss.length_penalty, loss.length_penalty_buffer, loss.length_penalty_weight) == ("soft_overlong", 0.25, 0.5)
        assert f"{table}.overlong_buffer_cfg.penalty_factor" in reported(found)  # rewards of DAPO's data are -1 and 1 there


def test_a_critic_that_warms_up_and_its_own_options(config: Path, valid) -> None:
    overrides = ["+trainer.critic_warmup=11", "+critic.optim.weight_decay=0.1", "+critic.optim.lr_warmup_steps=3"]
    found = import_recipe(config, overrides)
    critic = valid(found).critic
    assert (critic.warmup_steps, critic.weight_decay) == (10, 0.1)  # verl's policy trains from step 11 on, counted from 1
    assert {"critic.optim.lr_warmup_steps", "trainer.critic_warmup"} <= reported(found)  # the latter for the policy's cosine


@pytest.mark.parametrize(
    ("of_actor", "key"),
    [
        ("optim.lr_warmup_steps=3", "optim.lr_warmup_steps"),
        ("optim.betas=[0.9,0.95]", "optim.betas"),
        ("optim.min_lr_ratio=0.2", "optim.min_lr_ratio"),
        ("loss_agg_mode=seq-mean-token-mean", "loss_agg_mode"),
    ],
)
def test_a_critic_without_options_has_verls_defaults(config: Path, of_actor: str, key: str) -> None:
    """Those of its loss are the actor's there; those of its optimizer are not."""
    found = import_recipe(config, [f"++actor_rollout_ref.actor.{of_actor}"])
    assert f"critic.{key}" in reported(found)
    assert "critic.optim.eps" not in reported(found)


@pytest.mark.parametrize(
    "option", ["betas=[0.9,0.95]", "eps=1e-5", "min_lr_ratio=0.2", "warmup_style=cosine", "lr_decay_steps=7"]
)
def test_a_critics_own_moments_and_schedule_are_reported(config: Path, option: str) -> None:
    name = option.partition("=")[0]
    assert f"critic.optim.{name}" in reported(import_recipe(config, [f"+critic.optim.{option}"]))
    alike = [f"+critic.optim.{option}", f"++actor_rollout_ref.actor.optim.{option}"]
    assert f"critic.optim.{name}" not in reported(import_recipe(config, alike))


@pytest.mark.parametrize(
    ("options", "temperature", "is_reported"),
    [("", 0.0, False), ("temperature: 1.0", 1.0, True), ("temperature: 0.6, do_sample: true", 0.6, False)],
)
def test_held_out_samples_have_their_temperature_whatever_do_sample_says(
    config: Path, options: str, temperature: float, is_reported: bool
) -> None:
    found = import_recipe(config, ["data.val_files=v.parquet", f"++actor_rollout_ref.rollout.val_kwargs={{{options}}}"])
    assert found.values["evaluation.temperature"] == temperature
    assert ("actor_rollout_ref.rollout.val_kwargs.do_sample" in reported(found)) is is_reported


def test_groups_of_dynamic_sampling_and_of_one_answer(config: Path, valid) -> None:
    groups = "algorithm.filter_groups={enable: true, max_num_gen_batches: 10, metric: acc}"
    found = import_recipe(config, [groups, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"])
    recipe = valid(found)
    assert (recipe.rollout.dynamic_sampling, recipe.rollout.max_refill_ratio) == (True, 9.0)
    assert "algorithm.filter_groups.metric" in reported(found)
    bound = "algorithm.filter_groups.max_num_gen_batches"
    newer = import_recipe(
        config, [groups, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "+trainer.use_v1=true"]
    )
    assert (bound in reported(found), bound in reported(newer)) == (False, True)
    alone = import_recipe(config, ["algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"])
    assert alone.values["algorithm.grpo.advantage_baseline"] == "none"
    assert "actor_rollout_ref.rollout.n" in reported(alone)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("[a/train.parquet]", {"": "a/train.parquet"}),
        ("[a/train.parquet,b/train.parquet]", {"mix.a_train.": "a/train.parquet", "mix.b_train.": "b/train.parquet"}),
        ("[x.parquet,x.parquet]", {"mix.x_1.": "x.parquet", "mix.x_2.": "x.parquet"}),
    ],
)
def test_several_files_are_several_sets(config: Path, valid, files: str, expected: dict[str, str]) -> None:
    found = import_recipe(config, [f"data.train_files={files}", f"data.val_files={files}"])
    for split in ("train", "evaluation"):
        paths = {key: value for key, value in found.values.items() if key.startswith(f"data.{split}.") and key.endswith("path")}
        assert paths == {f"data.{split}.{within}path": path for within, path in expected.items()}
    assert found.values["evaluation.every_n_steps"] == 5
    valid(found)


OF_MACHINES = (
    "with a vLLM that was built for cpu",
    "with no TransformerEngine",
    "TransformerEngine is not installed",
    "expected a model directory, or a name on the Hub",
    "parquet",
)
"""Parts of problems that concern this machine or missing files."""


@pytest.mark.skipif(find_spec("vllm") is None, reason="the recipes name vLLM")
@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.experiment_name=..", "+trainer.critic_warmup=3", "+critic.model.path=acme/other"],
        ["algorithm.adv_estimator=rloo", "algorithm.filter_groups={enable: true}", "trainer.experiment_name=''"],
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.strategy=megatron",
            "+actor_rollout_ref.actor.megatron={tensor_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}",
            "+actor_rollout_ref.model.lora={rank: 8}",
        ],
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.strategy=veomni",
            "+actor_rollout_ref.actor.veomni={ulysses_parallel_size: 2, expert_parallel_size: 2, fsdp_size: 4}",
            "actor_rollout_ref.rollout.top_p=0.9",
        ],
        [
            "+distillation={enabled: true, teacher_models: {t: {model_path: acme/large}}, distillation_loss: {loss_mode: k1, "
            "use_task_rewards: false, use_policy_gradient: true}}",
            "algorithm.filter_groups={enable: true, max_num_gen_batches: 5}",
        ],
    ],
    ids=["critic", "groups of one", "megatron", "veomni", "distillation"],
)
def test_what_is_written_passes_the_whole_check(config: Path, tmp_path: Path, overrides: list[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(import_recipe(config, overrides), "a test"))
    try:
        prepare(recipe)
    except ConfigError as error:
        problems = [str(one) for one in error.problems]
        assert not [one for one in problems if not any(words in one for words in OF_MACHINES)]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["+trainer.critic_warmup=41"], "trainer.critic_warmup"),
        (
            ["actor_rollout_ref.actor.strategy=megatron", "+actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"],
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        ),
        (
            ["+actor_rollout_ref.actor.ulysses_sequence_parallel_size=16"],
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
        ),
    ],
)
def test_runs_that_cannot_be_are_refused_by_their_key(config: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found"):
        import_recipe(config, overrides)


@pytest.mark.parametrize("table", ["reward_model", "reward.reward_model"])
def test_rewards_of_a_model_are_its_environment(read_verl: Read, table: str) -> None:
    path = "model.path" if table == "reward_model" else "model_path"
    found = read_verl(f"+{table}.enable=true", f"+{table}.{path}=judge")
    assert found.values["environment.name"] == "reward_model"
    assert found.values["environment.reward_model.path"] == "judge"
    with pytest.raises(ConfigError, match=f"{table}.enable: found"):
        read_verl(f"+{table}.enable=true")
