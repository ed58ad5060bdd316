"""What is wrong with several data sets in place of one."""

import pytest

SUMS = 'data.train.mix.sums={source = "jsonl", path = "a.jsonl"}'


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        (("data.train.source=jsonl", "data.train.path=a.jsonl", SUMS), {"data.train.source", "data.train.path"}),
        (("data.train.mix={}",), {"data.train.mix"}),
        (('data.train.mix."a/b"={source = "environment"}',), {"data.train.mix.a/b"}),
        (("data.train.mix.sums.source=jsonl",), {"data.train.mix.sums.path"}),
        (("data.train.mix.sums.source=python",), {"data.train.mix.sums.source"}),
        (("data.train.mix.sums.weight=0",), {"data.train.mix.sums.weight"}),
        (("data.evaluation.mix.sums.weight=2",), {"data.evaluation.mix.sums.weight"}),
        (
            (SUMS, "data.train.mix.sums.environment=x", 'data.evaluation.mix.sums={environment="y"}'),
            {"data.evaluation.mix.sums.environment"},
        ),
        (("data.train.max_prompt_tokens=513",), {"data.train.max_prompt_tokens"}),
        (("data.train.mix.sums={}", "data.train.mix.sums.weigth=1"), {"data.train.mix.sums.weigth"}),
    ],
)
def test_what_is_wrong_is_at_its_key(problems, overrides: tuple[str, ...], paths: set[str]) -> None:
    assert {path.partition("[")[0] for path in problems("", *overrides)} == paths


def test_sound_sets_are_taken_and_their_paths_start_from_the_recipe(load, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    recipe = load('[data.train.mix.sums]\nsource = "jsonl"\npath = "a.jsonl"\n')
    assert recipe.data.train.mix["sums"].path == str(tmp_path / "a.jsonl")
    recipe = load("", SUMS, "data.train.mix.more.weight=0.5", "data.train.max_prompt_tokens=512")
    assert list(recipe.data.train.mix) == ["sums", "more"]
