"""dump_toml: every default written out, and the same recipe when loaded again."""

import tomllib
from pathlib import Path

import attrs
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.config.convert import convert
from rlcore.config.data import DataConfig, DatasetConfig
from rlcore.config.dump import dump_toml
from rlcore.config.load import read_raw
from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice, ObserversConfig, PluginChoice, PluginsConfig, SinksConfig
from rlcore.config.recipe import (
    EvaluationConfig,
    LoggingConfig,
    Recipe,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from rlcore.schema.describe import key_of
from rlcore.spi import ClusterConfig, ConfigError, LoraSpec, Problem

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20).filter(
    lambda text: text.strip() and not text.startswith("~")  # a home of nobody
)
names = st.from_regex(r"[a-zA-Z][a-zA-Z0-9 _.-]{0,10}[a-z]", fullmatch=True)
paths = st.from_regex(r"[a-z]{1,8}/[a-z]{1,8}", fullmatch=True)
numbers = st.integers(1, 2**40)
positive = st.floats(1e-300, 1e300)
temperatures = st.floats(1e-5, 1e300)
free = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def datasets():
    common = {
        "prompt_field": texts,
        "completion_field": texts,
        "limit": st.none() | numbers,
        "shuffle": st.booleans(),
        "on_long_prompt": st.sampled_from(["error", "drop"]),
        "max_prompt_tokens": st.none() | st.integers(1, 512),
    }
    hub = {"source": st.just("huggingface"), "path": paths, "subset": st.none() | texts, "split": st.none() | texts}
    return st.builds(DatasetConfig, **common) | st.builds(DatasetConfig, **hub, **common)


def recipes(sections):
    zed = st.builds(
        sections["trainer"]["zed"],
        rate=positive,
        betas=st.tuples(positive, positive),
        clip=st.none() | positive,
        targets=st.lists(st.text(max_size=8), max_size=3).map(tuple),
        schedule=st.builds(sections["algorithm"]["alg"], warmup_steps=st.integers(-5, 5)),
        extra=st.dictionaries(st.text(max_size=8), free, max_size=3),
        size=st.just("auto") | st.integers(-5, 5),
        weights=st.dictionaries(st.text(max_size=8), positive, max_size=3),
    )
    return st.builds(
        Recipe,
        model=st.builds(ModelConfig, path=paths, revision=st.none() | texts, chat_template=st.none() | texts),
        algorithm=st.builds(NamedPluginChoice, name=names, options=st.just({"alg": sections["algorithm"]["alg"]()})),
        environment=st.builds(NamedPluginChoice, name=names.map("x".__add__)),
        run=st.builds(RunConfig, directory=texts, name=names, seed=st.integers(0, 2**63 - 1), num_steps=numbers),
        data=st.builds(DataConfig, train=datasets(), evaluation=st.none() | datasets()),
        trainer=st.builds(PluginChoice, options=st.fixed_dictionaries({"zed": zed})),
        rollout=st.builds(
            RolloutConfig,
            temperature=temperatures,
            stop_strings=st.lists(st.text(min_size=1, max_size=9), max_size=3, unique=True).map(tuple),
            stop_token_ids=st.none() | st.lists(numbers, max_size=3).map(tuple),
        ),
        training=st.builds(TrainingConfig, prompts_per_step=st.integers(1, 2**20)),
        evaluation=st.builds(EvaluationConfig, temperature=temperatures, max_prompts=st.none() | numbers),
        logging=st.builds(LoggingConfig, rollouts_every_n_steps=numbers),
        sinks=st.builds(SinksConfig, names=st.lists(names.map("s".__add__), max_size=3, unique=True).map(tuple)),
        lora=st.none() | st.builds(LoraSpec, rank=numbers, alpha=positive, targets=st.just(("q_proj", "layers.0.mlp.up_proj"))),
        cluster=st.none() | st.builds(ClusterConfig, gpus_per_node=numbers, execution=st.just("threads")),
        observers=st.builds(
            ObserversConfig,
            names=st.lists(names.map("o".__add__), max_size=3).map(tuple),
            options=st.fixed_dictionaries(
                {"watch": st.builds(sections["observers"]["watch"], warmup_steps=st.integers(-5, 5))}
            ),
        ),
        plugins=st.builds(PluginsConfig, disable=st.just(("other", "role:name"))),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_dumped_loads_back(sections, tmp_path: Path, data: st.DataObject) -> None:
    recipe = data.draw(recipes(sections))
    if recipe.data.evaluation is None:
        recipe = attrs.evolve(recipe, evaluation=EvaluationConfig())
    path = tmp_path / "dumped.toml"
    path.write_bytes(dump_toml(recipe).encode())
    assert without_empty(convert(read_raw(path, ()), sections)) == without_empty(recipe)


def without_empty(recipe: Recipe) -> Recipe:
    """The recipe without the sections of environments that have no options: one that is there says nothing."""
    options = {name: value for name, value in recipe.environment.options.items() if attrs.fields(type(value))}
    return attrs.evolve(recipe, environment=attrs.evolve(recipe.environment, options=options))


def test_every_key_is_there_and_none_is_a_comment(load) -> None:
    lines = dump_toml(load()).splitlines()
    assert "# evaluation = none" in lines
    assert "[evaluation]" not in lines
    lines = dump_toml(load("", "data.evaluation={}")).splitlines()
    assert "# revision = none" in lines
    assert "# cluster = none" in lines
    for section in attrs.fields(Recipe):
        if section.name not in (
            "data",
            "trainer",
            "generator",
            "algorithm",
            "environment",
            "reference",
            "critic",
            "lora",
            "checkpoint_evaluation",
            "cluster",
            "sinks",
            "observers",
            "tables",
        ):
            assert f"[{key_of(section)}]" in lines
            for field in attrs.fields(section.type):
                written = any(line.removeprefix("# ").startswith(f"{field.name} = ") for line in lines)
                assert written or f"[{key_of(section)}.{field.name}]" in lines, field.name


def test_a_dump_of_a_dump_is_the_same(load, sections, tmp_path: Path) -> None:
    first = dump_toml(load("[trainer.zed.extra.deep]\na = [{b = 1}, {}]\n'x y' = {}", "run.name=it's"))
    path = tmp_path / "again.toml"
    path.write_text(first)
    assert dump_toml(convert(read_raw(path, ()), sections)) == first


def test_a_dump_holds_no_secret(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what recipe.toml, schedule.jsonl, model cards, reports and sinks get."""
    monkeypatch.setenv("SOME_KEY", "known secret")
    evaluation = (
        "command=['m', 'known secret']",
        "environment.MY_TOKEN=x7y",
        "serve=true",
        "serve_arguments=['--api-key', 'x7y']",
    )
    dumped = dump_toml(load("[trainer.zed.extra]\napi_key = 'x7y'", *(f"checkpoint_evaluation.{one}" for one in evaluation)))
    assert "x7y" not in dumped
    for line in ('MY_TOKEN = "***"', 'command = ["m", "***"]', 'serve_arguments = ["--api-key", "***"]', 'api_key = "***"'):
        assert line in dumped


def test_only_what_runs_and_what_was_set_is_kept_for_chosen_plugins(load) -> None:
    recipe = load("[trainer.strict]\nlevel = 3")
    tables = tomllib.loads(dump_toml(recipe, {"trainer": "other", "algorithm": "alg"}))
    assert tables["trainer"] == {"name": "auto", "strict": {"level": 3, "fast": False}}
    assert "alg" in tables["algorithm"]


def test_options_of_observers_in_use_are_kept_and_others_where_they_were_set(load, sections, tmp_path: Path) -> None:
    watch = {"warmup_steps": 0, "shape": "constant"}
    assert tomllib.loads(dump_toml(load()))["observers"] == {"names": []}
    assert tomllib.loads(dump_toml(load("", 'observers.names=["watch"]')))["observers"] == {"names": ["watch"], "watch": watch}
    assert tomllib.loads(dump_toml(load(), observers=["watch"]))["observers"] == {"names": [], "watch": watch}, "it is global"
    recipe = load("", "observers.guard.level=2", "observers.watch.warmup_steps=3")
    path = tmp_path / "dumped.toml"
    path.write_text(dump_toml(recipe))
    assert tomllib.loads(path.read_text())["observers"]["guard"] == {"level": 2, "fast": False}
    assert convert(read_raw(path, ()), sections) == recipe


@attrs.frozen(kw_only=True)
class Part:
    name: str
    limit: int | None = None
    inner: "tuple[Part, ...]" = ()


@attrs.frozen(kw_only=True)
class Whole:
    parts: tuple[Part, ...] = ()


def test_none_is_left_out_of_the_tables_of_an_array(load, sections, tmp_path: Path) -> None:
    whole = Whole(parts=(Part(name="a", inner=(Part(name="b"),)), Part(name="c", limit=3)))
    recipe = attrs.evolve(load(), trainer=PluginChoice(name="whole", options={"whole": whole}))
    path = tmp_path / "dumped.toml"
    path.write_text(dump_toml(recipe, {"trainer": "whole"}))
    assert convert(read_raw(path, ()), {**sections, "trainer": {"whole": Whole}}).trainer == recipe.trainer


def test_none_in_an_array_is_an_error(load) -> None:
    recipe = attrs.evolve(load(), trainer=PluginChoice(options={"odd": {"sizes": (1, None)}}))
    with pytest.raises(ValueError, match=r"^trainer\.odd\.sizes: found None"):
        dump_toml(recipe)


def test_what_toml_cannot_say_is_an_error(load) -> None:
    @attrs.frozen(kw_only=True)
    class Odd:
        size: int | None = 5

    recipe = attrs.evolve(load(), trainer=PluginChoice(options={"odd": Odd(size=None)}))
    with pytest.raises(ValueError, match="size is None"):
        dump_toml(recipe)


keys = st.sampled_from(
    [
        "model",
        "path",
        "run",
        "seed",
        "data",
        "train",
        "evaluation",
        "trainer",
        "zed",
        "schedule",
        "name",
        "rollout",
        "betas",
        "x",
    ]
)
anything = st.recursive(free, lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(document=st.dictionaries(keys, anything, max_size=6))
def test_whatever_a_file_says_is_a_recipe_or_a_list_of_problems(sections, tmp_path: Path, document: dict[str, object]) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(tomli_w.dumps(document).encode())
    problems: tuple[Problem, ...] = ()
    recipe = None
    try:
        recipe = convert(read_raw(path, ()), sections)
    except ConfigError as error:
        problems = error.problems
    assert isinstance(recipe, Recipe) != bool(problems)
    assert all(problem.path and problem.found and problem.expected for problem in problems)


def test_another_word_is_dumped_as_what_it_stands_for(tmp_path: Path, sections) -> None:
    path = tmp_path / "r.toml"
    path.write_text('model.path = "m"\nalgorithm.name = "alg"\nenvironment.name = "e"\n[run]\ndevice = "gpu"\n')
    recipe = convert(read_raw(path, ()), sections)
    assert recipe.run.device == "cuda"
    assert tomllib.loads(dump_toml(recipe))["run"]["device"] == "cuda"
    with pytest.raises(ConfigError) as raised:
        convert(read_raw(path, ["run.device=gpus"]), sections)
    (problem,) = [problem for problem in raised.value.problems if problem.path == "run.device"]
    assert problem.expected == 'one of "auto", "cpu", "cuda"'
