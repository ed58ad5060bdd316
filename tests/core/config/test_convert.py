"""convert: exact types, no unknown key, every problem at once, and the plugins' sections."""

import pytest
from attrs import frozen

from rlcore.config.convert import convert, selected_options
from rlcore.config.load import read_raw
from rlcore.config.recipe import Recipe
from rlcore.spi import ConfigError, Problem


def test_defaults_and_given_values(load) -> None:
    recipe = load('[rollout]\ntemperature = 1\nstop_strings = ["x"]\n[run]\nseed = 7')
    assert isinstance(recipe, Recipe)
    assert recipe.run.seed == 7
    assert recipe.rollout.temperature == 1.0
    assert type(recipe.rollout.temperature) is float
    assert recipe.rollout.stop_strings == ("x",)
    assert recipe.trainer.name == "auto"
    assert recipe.data.evaluation is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.seed=3.7", "an integer"),
        ("run.seed=3.0", "an integer"),
        ("run.seed=true", "an integer"),
        ('run.seed="3"', "an integer"),
        (f"run.seed={2**63}", "an integer of 64 bits"),
        ("run.name=3", "a string"),
        ("run.name=2026-01-01", "a string"),
        ("model.trust_remote_code=1", "true or false"),
        ('model.trust_remote_code="false"', "true or false"),
        ("rollout.temperature=true", "a number"),
        ("rollout.temperature=nan", "a finite number above 0"),
        (f"rollout.temperature={2**53 + 1}", "a number"),
        ('rollout.temperature="1.0"', "a number"),
        ("model.dtype=float16", 'one of "auto", "float64", "float32", "bfloat16"'),
        ("model.dtype=true", 'one of "auto", "float64", "float32", "bfloat16"'),
        ("evaluation.max_prompts=none", "an integer"),
        ('rollout.stop_strings="abc"', "an array of strings"),
        ('rollout.stop_token_ids="abc"', "an array of integers of at least 0"),
        ("rollout.stop_strings={a = 1}", "an array of strings"),
        ("run=3", "a table"),
        ("cluster=3", "a table"),
        ("cluster.gpus_per_node=true", "an integer"),
        ("cluster.placement=seperate", 'one of "colocated", "separate"'),
        ("data.train=[]", "a table"),
        ("trainer.zed=3", "a table"),
        ("trainer.zed.schedule=3", "a table"),
        ("trainer.zed.extra=3", "a table"),
    ],
)
def test_only_the_exact_type_is_taken(problems, override: str, expected: str) -> None:
    found = problems("", override)
    assert found.keys() == {override.partition("=")[0]}
    assert found[override.partition("=")[0]].expected == expected


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("rollout.stop_strings=[1]", "rollout.stop_strings[0]"),
        ('rollout.stop_token_ids=[1, "a"]', "rollout.stop_token_ids[1]"),
        ("trainer.zed.betas=[0.9, true]", "trainer.zed.betas[1]"),
        ("trainer.zed.schedule.warmup_steps=1.5", "trainer.zed.schedule.warmup_steps"),
        ("trainer.zed.schedule.shap=1", "trainer.zed.schedule.shap"),
        ('trainer.zed.weights={a = 1, b = "x"}', "trainer.zed.weights.b"),
    ],
)
def test_the_path_goes_all_the_way_down(problems, override: str, path: str) -> None:
    assert list(problems("", override)) == [path]


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ('model.trust_remote_code="False"', "Write false, without quotes."),
        ("model.trust_remote_code=True", "Write true, without quotes."),
        ("evaluation.max_prompts=None", "Leave the key out for none."),
        ("rollout.temperature=.5", "Write 0.5, without quotes."),
        ("run.seed=3.0", "Write 3."),
        ("run.name=3", 'Write "3", with its quotes'),
        ("rollout.stop_strings=x", "Put it into [brackets]."),
        ("model.dtype=bf16", 'Did you mean "bfloat16"?'),
        ("trainer=zed", '[trainer] and below it name = "zed"'),
    ],
)
def test_remedies(problems, override: str, remedy: str) -> None:
    assert remedy in problems("", override)[override.partition("=")[0]].remedy


def test_unknown_keys_get_the_nearest_or_the_place_where_they_exist(problems) -> None:
    found = problems(
        "",
        "cluster.gpu_per_node=2",
        "run.num_stpes=5",
        "training.temperature=1",
        "model.rate=1",
        "logging.watch=true",
        "modle.path=x",
        "num_steps=3",
        "zed.rate=1",
    )
    assert str(found["cluster.gpu_per_node"].remedy).startswith("Did you mean cluster.gpus_per_node?")
    assert found["run.num_stpes"].remedy == "Did you mean run.num_steps?"
    assert found["training.temperature"].remedy == "Did you mean rollout.temperature or evaluation.temperature?"
    assert found["model.rate"].remedy == "Did you mean trainer.zed.rate?"
    assert found["logging.watch"].remedy == 'Did you mean "watch" in observers.names?'
    assert found["modle"].remedy == "Did you mean model?"
    assert found["num_steps"].remedy == "Did you mean run.num_steps?"
    assert found["zed"].expected.startswith("one of model, algorithm")


def test_a_table_of_an_observer_is_checked_by_the_class_that_the_observer_brings(sections, tmp_path) -> None:
    @frozen(kw_only=True)
    class Watch:
        every: int = 1

    path = tmp_path / "recipe.toml"
    path.write_text("model.path = 'm'\nalgorithm.name = 'zed'\ndata.train = {source = 'jsonl', path = 'x'}")

    def load(*overrides: str) -> Recipe:
        classes = {**sections, "algorithm": {"zed": Watch}, "loop_observer": {"monitor": Watch}}
        return convert(read_raw(path, overrides), classes)

    assert load().tables == {}
    assert load("monitor.every=3").tables == {"monitor": Watch(every=3)}
    assert load("monitor={}").tables == {"monitor": Watch()}
    for override, key in (("monitor.evry=3", "monitor.evry"), ("monitor=3", "monitor"), ("tables.monitor={}", "tables")):
        with pytest.raises(ConfigError) as raised:
            load(override, "run.num_steps=0")
        assert {problem.path for problem in raised.value.problems} == {key, "run.num_steps"}


def test_everything_is_reported_at_once_and_ranges_of_sound_keys_too(problems) -> None:
    found = problems(
        """
        [run]
        seed = "one"
        num_steps = 0
        [rollout]
        top_p = 1.5
        temprature = 1.0
        [trainer.zed]
        rate = "high"
        [training]
        prompts_per_step = true
        minibatches_per_step = 64
        [data.train]
        source = "jsonl"
        [data.evaluation]
        limt = 3
        """
    )
    assert set(found) == {
        "run.seed",
        "run.num_steps",
        "rollout.top_p",
        "rollout.temprature",
        "trainer.zed.rate",
        "training.prompts_per_step",
        "data.train.path",
        "data.evaluation.limt",
    }, "minibatches_per_step is not judged by a prompts_per_step that is broken itself"


def test_missing_sections_and_keys_say_what_belongs_there(problems) -> None:
    found = problems("", complete=False)
    assert found["model.path"].found == "nothing"
    assert "Hugging Face directory" in found["model.path"].remedy
    assert found["algorithm.name"].remedy == "Installed: alg."


def test_a_section_without_its_required_key(problems) -> None:
    assert problems("[model]\ndtype = 'auto'\n[algorithm]\n", complete=False).keys() >= {"model.path", "algorithm.name"}


def test_problems_say_which_file_wrote_the_value(problems, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = problems("run.seed = 'x'", "run.num_steps='y'", "rollout.top_p=2")
    assert (found["run.seed"].found, found["run.seed"].origin) == ('"x" (a string)', "recipe.toml")
    assert (found["run.num_steps"].found, found["run.num_steps"].origin) == ('"y" (a string)', "the command line")
    assert str(found["run.num_steps"]).startswith('run.num_steps: found "y" (a string), from the command line; expected')
    assert found["rollout.top_p"].found == "2"


def test_every_installed_plugin_gets_its_options(load, sections) -> None:
    recipe = load("[trainer.zed]\nrate = 1e-5")
    assert recipe.trainer.options == {"zed": sections["trainer"]["zed"](rate=1e-5)}, "strict has a required key"
    assert recipe.algorithm.options == {"alg": sections["algorithm"]["alg"]()}
    assert load("", "trainer.strict.level=2").trainer.options["strict"].level == 2
    assert load("trainer.name = 'zed'").trainer.name == "zed"


def test_a_selected_plugin_needs_its_required_keys(problems) -> None:
    assert problems("trainer.name = 'strict'")["trainer.strict.level"].found == "nothing"


def test_options_of_a_plugin_that_auto_took(load, sections) -> None:
    recipe = load()
    strict = sections["trainer"]["strict"]
    with pytest.raises(ConfigError) as raised:
        selected_options(recipe.trainer, "trainer", "strict", strict)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [("trainer.strict.level", "nothing")]
    assert selected_options(recipe.trainer, "trainer", "zed", sections["trainer"]["zed"]) is recipe.trainer.options["zed"]


def test_sections_of_plugins_that_are_not_there(problems) -> None:
    found = problems("[trainer.zet]\nrate = 1\n[generator.fast]\n")
    assert found["trainer.zet"].expected == "an installed trainer: strict, zed"
    assert found["trainer.zet"].remedy == "Did you mean trainer.zed?"
    assert found["generator.fast"].expected == "an installed generator: none"
    assert "rlcore plugins" in found["generator.fast"].remedy
    assert problems("[algorithm.sft]\n")["algorithm.sft"].remedy == "Run: pip install rlcore-sft"


def test_a_section_of_the_recipe_written_below_a_plugin(problems) -> None:
    found = problems("[trainer.optimizer]\neps = 1\n[trainer.zed]\noptimizer = {learning_rate = 1}\nwarmup_steps = 1")
    assert found["trainer.optimizer"].remedy == "Did you mean [optimizer]?"
    assert found["trainer.zed.optimizer"].remedy == "Did you mean [optimizer]?"
    places = "schedule.warmup_steps or critic.warmup_steps or algorithm.alg.warmup_steps or observers.watch.warmup_steps"
    assert found["trainer.zed.warmup_steps"].remedy == f"Did you mean {places}?"


def test_names_of_plugins_that_are_not_there_are_reported_with_all_else(problems) -> None:
    found = problems("run.seed = 'x'", "trainer.name=zedd", "algorithm.name=xyz", 'observers.names=["guard", "wacth"]')
    assert found.keys() == {"run.seed", "trainer.name", "algorithm.name", "observers.names", "observers.guard.level"}
    assert found["trainer.name"].found == '"zedd"'
    assert found["trainer.name"].expected == "an installed trainer: strict, zed"
    assert found["trainer.name"].remedy == 'Did you mean "zed"?'
    assert found["trainer.name"].origin == "the command line"
    assert (found["algorithm.name"].found, found["algorithm.name"].remedy) == ('"xyz"', "")
    told = problems("run.seed = 'x'", "algorithm.name=sft")["algorithm.name"]
    assert (told.found, told.remedy) == ('"sft"', "Run: pip install rlcore-sft")
    assert (found["observers.names"].found, found["observers.names"].remedy) == ('"wacth"', 'Did you mean "watch"?')


def test_an_option_one_level_too_high(problems) -> None:
    found = problems("[trainer]\nrate = 1\nnmae = 'zed'")
    assert found["trainer.rate"].remedy == "Did you mean trainer.zed.rate?"
    assert found["trainer.nmae"].remedy == "Did you mean trainer.name?"


def test_observers_get_their_options(load, sections) -> None:
    watch = sections["observers"]["watch"]
    recipe = load("[observers]\nnames = ['watch']\n[observers.watch]\nwarmup_steps = 3")
    assert recipe.observers.names == ("watch",)
    assert recipe.observers.options == {"watch": watch(warmup_steps=3)}, "guard has a required key, and nobody asks for it"
    assert load().observers.options == {"watch": watch()}, "it may be global"
    assert load("", "observers.guard.level=2").observers.options["guard"].level == 2, "checked, though not in use"


def test_options_of_observers_are_checked_like_all_others(problems) -> None:
    found = problems(
        "[observers]\nnames = ['watch', 'guard']\nshape = 'cosine'\nnmaes = []\n[observers.wacth]\na = 1\n"
        "[observers.watch]\nwarmup_stepps = 1\nshape = 'cosin'",
        "run.seed=x",
    )
    assert found.keys() == {
        "observers.shape",
        "observers.nmaes",
        "observers.wacth",
        "observers.watch.warmup_stepps",
        "observers.watch.shape",
        "observers.guard.level",
        "run.seed",
    }
    assert found["observers.shape"].remedy == "Did you mean observers.watch.shape?"
    assert found["observers.nmaes"].expected == "names, or the table of an installed observer: guard, watch"
    assert found["observers.nmaes"].remedy == "Did you mean observers.names?"
    assert found["observers.wacth"].expected == "an installed observer: guard, watch"
    assert found["observers.wacth"].remedy == "Did you mean observers.watch?"
    assert found["observers.watch.warmup_stepps"].remedy == "Did you mean observers.watch.warmup_steps?"
    assert found["observers.watch.shape"].remedy == 'Did you mean "cosine"?'
    assert found["observers.guard.level"].found == "nothing"


def test_observers_that_are_no_table_or_whose_names_are_no_array(problems) -> None:
    assert problems("", "observers=watch")["observers"].remedy == 'Write [observers] and below it names = ["watch"].'
    assert problems("", "observers.names=watch")["observers.names"].expected == "an array of strings"


def test_a_class_s_own_check_is_reported_with_its_path(problems) -> None:
    problem = problems("[trainer.strict]\nlevel = 0")["trainer.strict"]
    assert problem.found.startswith("level = 0")
    assert "must be >= 1" in problem.expected


@frozen(kw_only=True)
class TellingOptions:
    """Reports problems of its own."""

    low: int = 0
    high: int = 1

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError([Problem(path="low", found=str(self.low), expected=f"at most high = {self.high}")])


def test_a_class_may_raise_problems_itself(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("model.path = 'm'\nalgorithm.name = 'a'\ndata.train = {source = 'jsonl', path = 'x'}\ntrainer.t.low = 3")
    with pytest.raises(ConfigError) as caught:
        convert(read_raw(path, ()), {"trainer": {"t": TellingOptions}})
    assert [problem.path for problem in caught.value.problems] == ["trainer.t.low"]


@frozen(kw_only=True)
class NeverOptions:
    """Cannot be made."""

    def __attrs_post_init__(self) -> None:
        raise TypeError("never")


def test_a_section_that_nobody_asks_for_stops_nothing(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("model.path = 'm'\nalgorithm.name = 'a'\ndata.train = {source = 'jsonl', path = 'x'}")
    sections = {"trainer": {"n": NeverOptions}}
    recipe = convert(read_raw(path, ()), sections)
    assert recipe.trainer.options == {}
    for asked_for in (
        lambda: convert(read_raw(path, ["trainer.name=n"]), sections),
        lambda: selected_options(recipe.trainer, "trainer", "n", NeverOptions),
    ):
        with pytest.raises(ConfigError) as raised:
            asked_for()
        (problem,) = raised.value.problems
        assert problem.path == "trainer.n"
        assert problem.expected.endswith(": never")


def test_unions_and_free_tables(load, problems) -> None:
    zed = load("[trainer.zed]\nsize = 3\nextra = {a = [1, 'x'], b = {c = true}}\nclip = 1\nweights = {a = 1}").trainer.options[
        "zed"
    ]
    assert zed.size == 3
    assert type(zed.size) is int
    assert zed.extra == {"a": [1, "x"], "b": {"c": True}}
    assert (zed.clip, zed.weights) == (1.0, {"a": 1.0})
    assert problems("trainer.zed.size = 1.5")["trainer.zed.size"].expected == 'an integer or "auto"'
    assert problems("trainer.zed.betas = [1]")["trainer.zed.betas"].expected == "an array of numbers, 2 of them"
