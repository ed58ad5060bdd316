"""Arithmetic problems: right, different, never both trained on and held out; and what their answers earn."""

import asyncio
import pickle
import re
from functools import partial

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.schema.structure import structure
from rlcore.spi import CheckContext, ConfigError, DataError, EnvironmentContext, FinishReason, ModelSpec, Turn
from rlcore_math.arithmetic import ArithmeticEnvironment
from rlcore_math.checks import check_arithmetic
from rlcore_math.config import ArithmeticConfig
from rlcore_math.problems import ProblemSpace
from rlcore_math.provider import ARITHMETIC
from rlcore_rollout.environment_runner import EpisodeRunner

SMALL = ArithmeticConfig(max_operand=9, num_train=40, num_evaluation=10)
configs = st.builds(
    ArithmeticConfig,
    operations=st.lists(st.sampled_from("+-*"), min_size=1, max_size=3, unique=True).map(tuple),
    num_terms=st.integers(2, 4),
    min_operand=st.integers(0, 3),
    max_operand=st.integers(12, 40),  # enough problems for the most that are asked for below
    num_train=st.integers(1, 30),
    num_evaluation=st.integers(1, 15),
    problem_seed=st.integers(0, 2**31),
)


def environment(config=SMALL):
    return ArithmeticEnvironment(EnvironmentContext(seed=0), config)


def turn(text, **options):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP, **options)


def score(answer, response, config=SMALL, **options):
    return asyncio.run(environment(config).step(answer, turn(response, **options)))


@pytest.mark.parametrize(
    ("response", "begins_in_thought", "reward"),
    [
        ("42", False, 1.0),
        ("42", True, 0.0),
        ("4</think>42", True, 1.0),
        ("<think>4</think>42", False, 1.0),
        ("<think>42", False, 0.0),
    ],
)
def test_a_number_in_a_thought_is_no_answer(response, begins_in_thought, reward):
    assert score("42", response, begins_in_thought=begins_in_thought).reward == reward


def content(prompt):
    """A prompt's summands with their signs, each with its factors, in no order: what exchanging operands leaves as it is."""
    summands = re.findall(r"([+-])([0-9*]+)", "+" + prompt[:-1])
    return tuple(sorted((sign, *sorted(map(int, factors.split("*")))) for sign, factors in summands))


@settings(max_examples=60)
@given(config=configs)
def test_train_and_evaluation_share_no_problem_nor_an_exchange_of_one(config):
    splits = {split: environment(config).rows(split) for split in ("train", "evaluation")}
    prompts = {split: {row["prompt"] for row in rows} for split, rows in splits.items()}
    assert len(prompts["train"]) == len(splits["train"]) == config.num_train
    assert len(prompts["evaluation"]) == len(splits["evaluation"]) == config.num_evaluation
    assert not set(map(content, prompts["evaluation"])) & set(map(content, prompts["train"]))


@settings(max_examples=60)
@given(config=configs)
def test_answers_are_those_of_the_prompts(config):
    for row in environment(config).rows("train"):
        assert row["answer"] == row["completion"] == str(eval(row["prompt"][:-1]))
        operands = [int(part) for part in row["prompt"][:-1].replace("-", "+").replace("*", "+").split("+")]
        assert len(operands) == config.num_terms
        assert all(config.min_operand <= operand <= config.max_operand for operand in operands)


@given(config=configs)
def test_problems_depend_on_their_own_seed_alone(config):
    first = ArithmeticEnvironment(EnvironmentContext(seed=1), config)
    second = ArithmeticEnvironment(EnvironmentContext(seed=2), config)
    assert list(first.rows("train")) == list(second.rows("train"))
    assert list(first.rows("evaluation")) == list(second.rows("evaluation"))


def test_another_seed_brings_other_problems():
    assert list(environment().rows("train")) != list(environment(evolve(SMALL, problem_seed=1)).rows("train"))


def test_the_held_out_problems_do_not_depend_on_how_many_are_trained_on():
    assert list(environment(evolve(SMALL, num_train=5)).rows("evaluation")) == list(environment().rows("evaluation"))


def test_a_full_space_can_be_used_and_not_one_problem_more():
    space = ProblemSpace(SMALL)
    left = space.num_left()
    full = environment(evolve(SMALL, num_train=left))
    held_out = {content(row["prompt"]) for row in full.rows("evaluation")}
    possible = {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert {row["prompt"] for row in full.rows("train")} == {prompt for prompt in possible if content(prompt) not in held_out}
    with pytest.raises(ConfigError) as raised:
        environment(evolve(SMALL, num_train=left + 1))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("environment.arithmetic.num_train", str(left + 1))
    assert problem.expected.startswith(f"at most {left}: of 100 possible problems")
    assert "raise max_operand" in problem.remedy


@pytest.mark.parametrize(
    ("options", "option", "expected"),
    [
        ({"min_operand": 10}, "max_operand", "at least min_operand, which is 10"),
        ({"num_evaluation": 100}, "num_evaluation", "fewer than the 100 possible problems"),
        ({"max_operand": 10**12}, "max_operand", "at most 4.61e+18"),
    ],
)
def test_impossible_options_are_named(options, option, expected):
    context = CheckContext(model=ModelSpec(path="m"), device="cpu", world_size=1, max_sequence_length=8)
    problems = check_arithmetic(context, evolve(SMALL, **options))
    assert [problem.path for problem in problems] == [f"environment.arithmetic.{option}"]
    assert expected in problems[0].expected
    with pytest.raises(ConfigError) as raised:
        environment(evolve(SMALL, **options))
    assert list(raised.value.problems) == list(problems)


def test_options_out_of_range_are_all_named():
    wrong = {"operations": ["+", "+"], "num_terms": 1, "min_operand": -1, "num_train": 0, "num_evaluation": 0}
    _, problems = structure(wrong | {"partial_credit": 1.0}, ArithmeticConfig, "arithmetic")
    assert {problem.path.removeprefix("arithmetic.") for problem in problems} == {*wrong, "partial_credit"}
    assert structure({"operations": []}, ArithmeticConfig, "")[1]
    assert structure({"operations": ["/"]}, ArithmeticConfig, "")[1]


@pytest.mark.parametrize("response", ["95", " 95\n", "95 "])
def test_the_exact_answer_earns_one(response):
    result = score("95", response)
    assert (result.reward, result.success, result.done, result.observation) == (1.0, True, True, None)
    assert result.metrics == {"well_formed": 1.0}


@pytest.mark.parametrize(
    ("response", "well_formed"),
    [
        ("96", 1.0),
        ("-95", 1.0),
        ("095", 1.0),
        ("", 0.0),
        ("95.", 0.0),
        ("9 5", 0.0),
        ("+95", 0.0),
        ("37+58=95", 0.0),
        ("٩٥", 0.0),
    ],
)
def test_anything_else_earns_nothing(response, well_formed):
    result = score("95", response)
    assert (result.reward, result.success) == (0.0, False)
    assert result.metrics == {"well_formed": well_formed}


@pytest.mark.parametrize(
    ("answer", "response", "share"),
    [
        ("95", "85", 1 / 2),
        ("95", "96", 1 / 2),
        ("95", "195", 2 / 3),
        ("123", "3", 1 / 3),
        ("-12", "12", 2 / 3),
        ("95", "9x", 0.0),
    ],
)
def test_partial_credit_counts_digits_from_the_last(answer, response, share):
    config = evolve(SMALL, partial_credit=0.5)
    result = score(answer, response, config)
    assert result.reward == pytest.approx(0.5 * share)
    assert not result.success
    assert score(answer, answer, config).reward == 1.0


@given(answer=st.integers(-(10**6), 10**6), response=st.text("0123456789-", max_size=8), credit=st.floats(0.0, 0.99))
def test_only_the_right_answer_is_a_success(answer, response, credit):
    result = score(str(answer), response, evolve(SMALL, partial_credit=credit))
    assert result.success == (response == str(answer))
    assert 0.0 <= result.reward <= (1.0 if result.success else credit)


def test_episodes_run_from_rows_to_rewards():
    made = environment()
    runner = EpisodeRunner(made, 5.0)
    rows = made.rows("train")[:4]
    resets = runner.reset_all(rows, [0] * 4)
    assert [reset.observation.text for reset in resets] == [row["prompt"] for row in rows]
    states = pickle.loads(pickle.dumps([reset.state for reset in resets]))
    results = runner.step_all(states, [turn(row["completion"]) for row in rows])
    assert [result.reward for result in results] == [1.0] * 4
    runner.close()


def test_chat_prompts():
    made = environment(evolve(SMALL, prompt_format="chat"))
    row = made.rows("train")[0]
    text = environment().rows("train")[0]["prompt"]
    assert row["prompt"] == [{"role": "user", "content": text}]
    assert asyncio.run(made.reset(row, 0)).observation.messages == row["prompt"]


def test_rows_of_another_data_set_need_prompt_and_answer():
    with pytest.raises(DataError, match="fields 'prompt'; .* answer"):
        asyncio.run(environment().reset({"prompt": "1+1="}, 0))


def test_an_unknown_split():
    with pytest.raises(ValueError, match="found split 'test'"):
        environment().rows("test")


def test_rows_slice_and_index():
    rows = environment().rows("train")
    assert rows[-1] == rows[39] == rows[np.int64(39)]
    assert list(rows[2:5]) == [rows[2], rows[3], rows[4]]
    with pytest.raises(IndexError):
        rows[40]


@pytest.mark.own_process
def test_problems_are_made_as_they_are_read(count_calls):
    """A hundred times as many rows take no more calls."""

    def read(num_train):
        rows = environment(ArithmeticConfig(max_operand=9999, num_train=num_train)).rows("train")
        assert len(rows) == num_train
        assert rows[num_train - 1] == rows[-1]

    few, many = (count_calls(partial(read, num_train)) for num_train in (10_000, 1_000_000))
    assert many < 2 * few


def test_the_provider_names_what_exists():
    assert ARITHMETIC.backend == "rlcore_math.arithmetic:ArithmeticEnvironment"
    assert ARITHMETIC.check == "rlcore_math.checks:check_arithmetic"
    assert ARITHMETIC.config is ArithmeticConfig
    assert ARITHMETIC.unavailable() is None


@pytest.mark.parametrize(("response", "parts"), [("12", (1.0, 1.0)), ("13", (0.5, 1.0)), ("a", (0.0, 0.0))])
def test_a_reward_names_what_it_is_made_of(response, parts):
    result = score("12", response, evolve(SMALL, partial_credit=1.0))
    assert (result.reward_components["answer"], result.reward_components["well_formed"]) == parts
    assert result.reward == parts[0]
