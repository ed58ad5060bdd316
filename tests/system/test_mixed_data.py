"""Several data sets in one run, each with its environment; and prompts that come less often once nothing is learned of them."""

import json
from collections import Counter
from pathlib import Path

import pandas
import pytest

from .system_support import Workplace, expect_failure, read_metrics, write_jsonl  # type: ignore[import-not-found]

MIXED = """
extends = "grpo.toml"
[environment.function]
path = "lengths.py:short"
[data.train.mix.sums]
weight = 3.0
[data.train.mix.texts]
source = "csv"
path = "texts.csv"
environment = "function"
[data.evaluation.mix.sums]
limit = 4
[data.evaluation.mix.texts]
source = "jsonl"
path = "texts.jsonl"
environment = "function"
"""
SHORT = """
def short(completion, row, **_):
    assert row["data_set"] == "texts"
    return 1.0 / (1 + len(completion)) + 2.0
"""
ALL = ("logging.rollouts_every_n_steps=1", "checkpoint.every_n_steps=1")


@pytest.fixture
def mixed(workplace: Workplace) -> Workplace:
    (workplace.folder / "mixed.toml").write_text(MIXED)
    (workplace.folder / "lengths.py").write_text(SHORT)
    (workplace.folder / "texts.csv").write_text("prompt,kind\n" + "".join(f"{n}=,train\n" for n in range(5)))
    write_jsonl(workplace.folder / "texts.jsonl", [{"prompt": f"={n}"} for n in range(3)])
    return workplace


def prompts(run: Path, step: int) -> list[str]:
    table = pandas.read_parquet(run / "rollouts" / f"step-{step:06d}.parquet")
    return [str(prompt) for prompt in table["prompt"]]


def test_each_set_has_its_share_and_its_environment(mixed: Workplace) -> None:
    run = mixed.train("mixed.toml", *ALL)
    records = read_metrics(run)
    counts: Counter[str] = Counter()
    for record in records[1:]:
        step = int(record["step"])
        texts = [prompt for prompt in prompts(run, step) if len(prompt) == 2]
        assert record.get("data/texts/samples", 0.0) == len(texts) == 16 - record["data/sums/samples"]
        counts["texts"] += len(texts)
        if texts:
            assert 2.0 < record["data/texts/reward_mean"] <= 3.0
        assert 0.0 <= record["data/sums/reward_mean"] <= 1.0
        parts = {name: record[f"data/{name}/samples"] for name in ("sums", "texts") if f"data/{name}/samples" in record}
        mean = sum(number * record[f"data/{name}/reward_mean"] for name, number in parts.items()) / 16
        assert record["reward_mean"] == pytest.approx(mean, rel=1e-5)
    assert abs(counts["texts"] - 16) <= 4  # of 64 samples, by weights of 3 and 1, to within one prompt
    assert records[0]["eval/pass@1/texts"] == 1.0
    shares = {"sums": 4, "texts": 3}
    mean = sum(records[0][f"eval/pass@1/{name}"] * number for name, number in shares.items()) / 7
    assert records[0]["eval/pass@1"] == pytest.approx(mean)


@pytest.mark.wide(keep=["curriculum"])  # tests/core/run/data resumes mixes
@pytest.mark.parametrize("curriculum", [(), ("data.zero_variance_weight=0.1",)], ids=["no curriculum", "curriculum"])
def test_a_resumed_run_takes_the_same_prompts(mixed: Workplace, curriculum: tuple[str, ...]) -> None:
    whole = mixed.train("mixed.toml", *ALL, *curriculum, "run.name=whole")
    mixed.train("mixed.toml", *ALL, *curriculum, "run.num_steps=2", "evaluation.at_end=false", "run.name=parts")
    parts = mixed.train("mixed.toml", *ALL, *curriculum, "run.name=parts", "--resume")
    assert [prompts(parts, step) for step in range(1, 5)] == [prompts(whole, step) for step in range(1, 5)]
    assert read_metrics(parts)[-1] == read_metrics(whole)[-1]
    if curriculum:
        assert read_metrics(whole)[-1]["data/zero_variance_prompts"] > 0


def test_check_says_what_is_mixed(mixed: Workplace) -> None:
    result = mixed.rlcore("check", "mixed.toml")
    assert result.exit_code == 0, result.stderr
    assert "65 rows of sums (weight 3), texts (weight 1)" in " ".join(result.stdout.split())
    other = "data.train.mix.texts.environment=functoin"
    expect_failure(mixed.rlcore("check", "mixed.toml", other), 2, 'expected "functoin"')
    unknown = mixed.rlcore("check", "mixed.toml", other, "data.evaluation.mix.texts.environment=functoin")
    expect_failure(unknown, 3, "functoin")
    named = {"prompt": "1=", "data_set": "own"}
    write_jsonl(mixed.folder / "texts.jsonl", [named])
    expect_failure(mixed.rlcore("check", "mixed.toml"), 4, json.dumps("data_set").replace('"', "'"))


def test_demonstrations_are_mixed(mixed: Workplace) -> None:
    """A first row of each set is left out, which moves no other into another set."""
    long = {"prompt": "1+1=", "completion": "2" * 100}
    write_jsonl(mixed.folder / "answers.jsonl", [long, {"prompt": "1+1=", "completion": "2"}])
    sets = (
        "data.train.mix.texts={source='csv', path='pairs.csv'}",
        "data.train.mix.sums={source='jsonl', path='answers.jsonl'}",
        "data.train.on_long_prompt=drop",
    )
    (mixed.folder / "pairs.csv").write_text(f"prompt,completion\n5=,{'5' * 100}\n12=,12\n34=,34\n")
    run = mixed.train("sft.toml", *sets, "run.num_steps=2")
    first, last = read_metrics(run)
    assert first["data/sums/samples"] + first["data/texts/samples"] > 0
    for record in (first, last):
        tokens = {"sums": 2 * record["data/sums/samples"], "texts": 3 * record["data/texts/samples"]}  # with the end
        losses = {name: record[f"data/{name}/loss"] for name, number in tokens.items() if number}
        mean = sum(tokens[name] * loss for name, loss in losses.items()) / sum(tokens.values())
        assert record["loss"] == pytest.approx(mean, rel=1e-5)
        assert len({*losses.values()}) == len(losses)


def test_rows_of_one_set_that_name_another_by_a_field_of_theirs_are_refused(mixed: Workplace) -> None:
    """They would go to that set's environment."""
    write_jsonl(mixed.folder / "named.jsonl", [{"prompt": "1+1=", "data_set": "texts"}])
    recipe = MIXED.partition("[data.train.mix.sums]")[0] + '[data.train]\nsource = "jsonl"\npath = "named.jsonl"\n'
    (mixed.folder / "named.toml").write_text(
        recipe + "[data.evaluation.mix.sums]" + MIXED.partition("[data.evaluation.mix.sums]")[2]
    )
    expect_failure(mixed.rlcore("check", "named.toml"), 4, "row 0", "a field 'data_set' with 'texts'")


def test_held_out_demonstrations_of_each_set_are_told(workplace: Workplace, model: Path) -> None:
    """The loss of all is the mean over tokens, each answer of one or two and the token that ends it."""
    write_jsonl(workplace.folder / "one.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}])
    write_jsonl(
        workplace.folder / "two.jsonl", [{"prompt": "7+7=", "completion": "14"}, {"prompt": "8+8=", "completion": "16"}]
    )
    sets = "".join(
        f'[data.{split}.mix.{name}]\nsource = "jsonl"\npath = "{name}.jsonl"\n'
        for split in ("train", "evaluation")
        for name in ("one", "two")
    )
    (workplace.folder / "held.toml").write_text(f'[model]\npath = "{model}"\n[algorithm]\nname = "sft"\n{sets}')
    options = (
        "run.num_steps=1",
        "sinks.names=[]",
        "rollout.max_prompt_tokens=8",
        "rollout.max_response_tokens=8",
        "evaluation.max_prompts=1",
    )
    last = read_metrics(workplace.train("held.toml", *options, "training.prompts_per_step=2"))[-1]
    expected = (2 * last["eval/loss/one"] + 3 * last["eval/loss/two"]) / 5
    assert last["eval/loss"] == pytest.approx(expected, rel=1e-6)
    assert last["eval/loss/one"] != last["eval/loss/two"]


def test_prompts_over_a_sets_own_limit_are_left_out_and_told(workplace: Workplace) -> None:
    write_jsonl(workplace.folder / "rows.jsonl", [{"prompt": p, "completion": "2"} for p in ("1+1=", "1+1+0=", "2=")])
    options = ("data.train.source=jsonl", "data.train.path=rows.jsonl", "data.train.max_prompt_tokens=4")
    expect_failure(workplace.rlcore("check", "sft.toml", *options), 4, "data.train.max_prompt_tokens", "row 1")
    result = workplace.rlcore("train", "sft.toml", *options, "data.train.on_long_prompt=drop", "run.num_steps=1")
    assert result.exit_code == 0, result.stderr
    assert "data.train: 1 of 3 rows are over the limits and left out" in " ".join(result.stdout.split())
