"""What the types cannot say: ranges, and combinations that cannot work or would silently do nothing."""

import typing

import attrs
import pytest

from rlcore.config.convert import convert
from rlcore.config.load import read_raw
from rlcore.config.recipe import Recipe
from rlcore.config.validate import RULES, value_at
from rlcore.installed import is_installed
from rlcore.schema import describe, types
from rlcore.spi import ConfigError

WITH_DATASETS = pytest.mark.skipif(not is_installed("rlcore_datasets"), reason="reads Parquet by rlcore-datasets")


@pytest.mark.parametrize(
    "override",
    [
        "run.num_steps=0",
        "run.seed=-1",
        "run.name=",
        "run.name=..",
        "run.name=a/b",
        "run.directory=",
        "model.path=",
        'model.chat_template=""',
        "rollout.samples_per_prompt=0",
        "rollout.max_prompt_tokens=0",
        "rollout.max_response_tokens=-5",
        "rollout.temperature=0",
        "rollout.temperature=-1.0",
        "rollout.temperature=inf",
        "rollout.top_k=-1",
        "rollout.top_k=1",
        "rollout.top_p=0",
        "rollout.top_p=1.01",
        'rollout.stop_strings=["a", ""]',
        'rollout.stop_strings=["a", "a"]',
        "rollout.stop_token_ids=[-1]",
        "rollout.max_turns=0",
        "rollout.environment_timeout_s=0",
        "rollout.environment_timeout_s=inf",
        "rollout.max_failed_fraction=1.5",
        "rollout.max_turn_tokens=513",
        "rollout.episode_timeout_s=0",
        "rollout.environment_concurrency=0",
        "rollout.tool_parser=''",
        "model.chat_template_kwargs={tokenize=true}",
        "training.prompts_per_step=0",
        "training.minibatches_per_step=0",
        "training.minibatches_per_step=33",
        "training.max_tokens_per_microbatch=0",
        "training.warn_token_mult_prob_error=0.9",
        "training.max_token_mult_prob_error=1.0",
        "optimizer.learning_rate=0",
        "optimizer.learning_rate=inf",
        "optimizer.betas=[0.9, 1.0]",
        "optimizer.betas=[-0.1, 0.9]",
        "optimizer.eps=0",
        "optimizer.weight_decay=-0.1",
        "optimizer.max_grad_norm=-1",
        "optimizer.name=adam",
        "optimizer.moments=4bit",
        "optimizer.muon={}",
        "optimizer.muon.momentum=1.0",
        "optimizer.muon.newton_schulz_steps=0",
        "optimizer.groups=[{parameters=[]}]",
        'optimizer.groups=[{parameters=["a", ""]}]',
        'optimizer.groups=[{parameters=["a"], name="adamw"}]',
        'critic.groups=[{parameters=["a"], name="adamw"}]',
        "schedule.warmup_steps=-1",
        "schedule.min_learning_rate_ratio=1.5",
        "schedule.min_learning_rate_ratio=-0.5",
        "schedule.min_learning_rate_ratio=0.5",
        "refit.max_bucket_mib=0",
        'checkpoint.export="peft"',
        'refit.adapters="unmerged"',
        "refit.max_adapters=2",
        "refit.max_adapters=0",
        "evaluation.every_n_steps=-1",
        "evaluation.every_n_steps=5",
        "evaluation.max_prompts=0",
        "evaluation.samples_per_prompt=0",
        "evaluation.samples_per_prompt=4",
        "evaluation.temperature=-0.5",
        "evaluation.top_k=-1",
        "evaluation.top_p=2",
        "checkpoint.every_n_steps=-1",
        "checkpoint.keep=0",
        "cluster.max_restarts=-1",
        "logging.rollouts_every_n_steps=-1",
        "data.train.limit=0",
        "data.train.prompt_field=",
        "data.train.completion_field=",
        "data.train.subset=main",
        "data.train.split=train",
        'plugins.disable=[""]',
        "data.on_overlap=error",
        "model.chat_template_kwargs.budget=inf",
        "model.chat_template_kwargs.budget=-inf",
        "model.chat_template_kwargs.enable-thinking=true",
        "rollout.temperature=1e-300",
        "evaluation.temperature=1e-6",
        "training.prompts_per_step=100000000000",
        "rollout.samples_per_prompt=1000000000",
        "evaluation.samples_per_prompt=1000000000000",
        "async.max_staleness=1000000000000",
        "run.directory=/dev/null",
        "run.directory=/dev/null/runs",
    ],
)
def test_one_bad_value_is_one_problem_at_its_key(problems, override: str) -> None:
    key = override.partition("=")[0]
    ((path, problem),) = problems("", override).items()
    assert path.partition("[")[0] == key
    assert problem.expected


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (
            "critic.groups[0].name",
            ("optimizer.name=muon", "critic.name=adamw", "critic.groups=[{parameters=['a'], name='adamw'}]"),
        ),
        (
            "optimizer.groups[0].name",
            ("critic={name='muon', groups=[]}", "optimizer.groups=[{parameters=['a'], name='adamw'}]"),
        ),
        ("optimizer.muon", ("critic.name=adamw", "optimizer.muon={}")),
    ],
)
def test_settings_of_muon_need_a_model_that_it_trains(problems, path: str, overrides: tuple[str, ...]) -> None:
    assert list(problems("", *overrides)) == [path]


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.minibatches_per_step=32",),
        ("training.max_token_mult_prob_error=inf",),
        ("training.warn_token_mult_prob_error=inf", "training.max_token_mult_prob_error=1.01"),
        ("optimizer.max_grad_norm=0.0", "optimizer.betas=[0.0, 0.0]"),
        ("optimizer.name=muon", "optimizer.muon={scale='original'}", "optimizer.groups=[{parameters=['a'], name='adamw'}]"),
        ("optimizer.muon={}", "critic.name=muon", "lora.rank=4", "optimizer.moments=8bit"),
        ("optimizer.name=muon", "critic.name=adamw", "optimizer.groups=[{parameters=['a'], name='adamw'}]"),
        ("critic.name=muon", "optimizer.groups=[{parameters=['a'], name='adamw'}]"),  # which the critic takes over
        ("critic.name=muon", "critic.groups=[{parameters=['a'], name='adamw'}]"),
        ("optimizer.name=muon", "critic.groups=[{parameters=['a'], name='adamw'}]"),
        ("schedule.decay=cosine", "schedule.min_learning_rate_ratio=1.0", "schedule.warmup_steps=1000"),
        ("rollout.top_k=1", "rollout.samples_per_prompt=1"),
        ("data.evaluation={}", "evaluation.samples_per_prompt=4", "evaluation.temperature=0.7"),
        ("data.evaluation={}", "evaluation.top_k=5", "evaluation.top_p=0.9", "evaluation.temperature=0.7"),
        ("data.evaluation={}", "evaluation.at_start=true"),
        ("evaluation.every_n_steps=0", "evaluation.at_start=false", "evaluation.at_end=false"),
        ("data.evaluation={}", "evaluation.every_n_steps=5"),
        ("data.train.source=jsonl", "data.train.path=x.jsonl"),
        ("data.train.source=jsonl", "data.train.path=rows.txt"),
        ("data.train.source=huggingface", "data.train.path=org/set", "data.train.subset=main", "data.train.split=train"),
        ("plugins.disable=['zed']",),
        ("run.name=2026-11-21 demo",),
        ("rollout.max_failed_fraction=0.2",),
        ("rollout.max_turn_tokens=8", "rollout.max_response_tokens=8"),
        ("model.chat_template_kwargs={enable_thinking=false}",),
        ("data.evaluation={}", "data.on_overlap=error"),
        ("rollout.temperature=1e-5",),
        ("data.evaluation={}", "evaluation.temperature=1e-5", "evaluation.samples_per_prompt=1024"),
        ("training.prompts_per_step=65536", "rollout.samples_per_prompt=256", "async.max_staleness=1000"),
        ("run.directory=/dev/shm/none/runs",),
    ],
)
def test_sound_combinations(load, overrides: tuple[str, ...]) -> None:
    assert isinstance(load("", *overrides), Recipe)


@pytest.mark.parametrize(
    ("overrides", "path", "remedy"),
    [
        (("data.train.path=x.jsonl",), "data.train.path", 'Set data.train.source = "jsonl".'),
        pytest.param(
            ("data.train.path=x.parquet",), "data.train.path", 'Set data.train.source = "parquet".', marks=WITH_DATASETS
        ),
        (("data.train.path=org/set",), "data.train.path", 'Set data.train.source = "huggingface".'),
        (("data.evaluation.source=jsonl",), "data.evaluation.path", ""),
        pytest.param(
            ("data.train.source=jsonl", "data.train.path=x.parquet"),
            "data.train.source",
            'source = "parquet", or rename',
            marks=WITH_DATASETS,
        ),
        (
            ("data.evaluation={}", "evaluation.top_k=1", "evaluation.temperature=1", "evaluation.samples_per_prompt=2"),
            "evaluation.samples_per_prompt",
            "",
        ),
        (("data.evaluation={}", "evaluation.top_p=0.9"), "evaluation.top_p", "Set evaluation.temperature above 0"),
        (("data.evaluation={}", "evaluation.top_k=5"), "evaluation.top_k", "or leave the key out"),
        (
            ("data.evaluation={}", "evaluation.pass_at_k=[1, 4]"),
            "evaluation.pass_at_k",
            "Set evaluation.samples_per_prompt = 4 or more",
        ),
        (("optimizer.name=muon", "lora.rank=4"), "optimizer.name", ""),
        (("plugins.disable=['alg']",), "plugins.disable", ""),
        (("trainer.name=zed", "plugins.disable=['trainer:zed']"), "plugins.disable", ""),
        (("observers.names=['watch']", "plugins.disable=['observer:watch']"), "plugins.disable", ""),
    ],
)
def test_combinations_that_cannot_work(problems, overrides: tuple[str, ...], path: str, remedy: str) -> None:
    found = problems("", *overrides)
    assert set(found) == {path}
    assert remedy in found[path].remedy


@pytest.mark.parametrize("written", ["at_start=true", "at_end=true", "temperature=0.7", "temperature=0.0", "max_prompts=4"])
def test_what_is_to_be_evaluated_needs_a_held_out_set(problems, written: str) -> None:
    found = problems("", f"evaluation.{written}")
    key = f"evaluation.{written.partition('=')[0]}"
    assert set(found) == {key}
    assert found[key].found.endswith("without a [data.evaluation]")


def test_without_an_environment_there_must_be_data_and_no_evaluation(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('model.path = "m"\nalgorithm.name = "a"\n[data.evaluation]\n')
    with pytest.raises(ConfigError) as caught:
        convert(read_raw(path, ()), {})
    assert [problem.path for problem in caught.value.problems] == ["data.train.source", "data.evaluation"]
    path.write_text('model.path = "m"\nalgorithm.name = "a"\ndata.train = {source = "jsonl", path = "x.jsonl"}')
    assert convert(read_raw(path, ()), {}).environment is None


def test_a_revision_of_a_local_directory(problems, tmp_path) -> None:
    found = problems(f"model.path = '{tmp_path}'\nmodel.revision = 'main'")
    assert set(found) == {"model.revision"}


def test_every_rule_reads_keys_that_exist(load) -> None:
    recipe = load("", "data.evaluation={}")
    for rule in RULES:
        for key in rule.keys:
            value_at(recipe, key)


def test_no_number_of_the_recipe_goes_unchecked() -> None:
    """A new number gets a range, unless each of its values makes sense."""
    sections = [cls for field in describe.fields(Recipe).values() for cls in types.innermost(field.type) if attrs.has(cls)]
    assert len(sections) > 10
    unbounded = [
        f"{cls.__name__}.{name}"
        for cls in sections
        for name, field in describe.fields(cls).items()
        if {int, float} & {*(typing.get_args(field.type) if types.is_union(field.type) else (field.type,))}
    ]
    assert unbounded == []
