"""What reward functions may return, and how it adds up."""

import numpy as np
import pytest

from rlcore.spi import RewardError
from rlcore_rewards.score import RewardOutput, combine, read


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.int64(3), np.bool_(True)])
def test_a_number_is_the_reward(value: object) -> None:
    said = read("f", value)
    assert said == RewardOutput("f", {"reward": float(value)})  # type: ignore[arg-type]
    assert type(said.figures["reward"]) is float
    score = combine([said], {}, 1.0)
    assert (score.reward, score.success, score.metrics) == (float(value), float(value) >= 1.0, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "'f' returned None"),
        (float("nan"), "'f' returned nan"),
        (10**400, "returned 1000"),
        ("1", "returned '1'"),
        ([1.0], r"returned \[1.0\]"),
        ({"reward": None}, "None as 'reward'"),
        ({"reward": 1.0, "length": float("inf")}, "inf as 'length'"),
        ({"reward": 1.0, "success": 1}, "'success' as 1"),
    ],
)
def test_everything_else_is_no_reward(value: object, names: str) -> None:
    with pytest.raises(RewardError, match=names):
        read("f", value)


def test_a_mapping_brings_metrics_and_success() -> None:
    score = combine([read("f", {"reward": 0.5, "success": True, "length": 3})], {"f": 2.0}, 9.0)
    assert (score.reward, score.success, score.metrics) == (1.0, True, {"length": 3.0})
    assert score.components == {}


def test_parts_of_a_mapping_are_weighted_where_it_has_no_reward() -> None:
    score = combine([read("f", {"right": 1, "short": 0.5, "length": 7})], {"right": 1.0, "short": 0.2}, 1.0)
    assert score.reward == pytest.approx(1.1)
    assert score.metrics == {"right": 1.0, "short": 0.5, "length": 7.0}
    assert score.components == {"right": 1.0, "short": 0.1}


def test_functions_add_up_by_their_weights() -> None:
    said = [read("right", True), read("form", {"reward": 0.5, "success": False, "lines": 2}), read("short", {"words": 4})]
    score = combine(said, {"form": 0.2, "words": -0.1}, 0.0)
    assert score.reward == pytest.approx(1.0 + 0.2 * 0.5 - 0.1 * 4)
    assert score.success is False
    assert score.metrics == {"right": 1.0, "form": 0.5, "lines": 2.0, "words": 4.0}
    assert score.components == pytest.approx({"right": 1.0, "form": 0.1, "words": -0.4})
    assert score.reward == pytest.approx(sum(score.components.values()))


@pytest.mark.parametrize(
    ("values", "weights", "names"),
    [
        ([{"length": 3}], {}, "'f0' returned.*'length'.*'reward'"),
        ([1.0], {"f1": 2.0}, "'f1'.*'f0'"),
        ([{"reward": 1, "n": 1}, {"reward": 1, "n": 2}], {}, "'f1'.*'n'"),
    ],
)
def test_sums_that_cannot_be_made(values: list[object], weights: dict[str, float], names: str) -> None:
    with pytest.raises(RewardError, match=names):
        combine([read(f"f{number}", value) for number, value in enumerate(values)], weights, 1.0)


def test_parts_of_an_answer_are_weighed_with_their_function() -> None:
    said = [read("f", {"reward": 1.0, "part_rewards": {3: 0.5, 7: 0.25}}), read("g", {"reward": 2.0, "part_rewards": {3: 1}})]
    score = combine(said, {"f": 2.0}, 5.0)
    assert dict(score.part_rewards) == {3: 2.0, 7: 0.5}
    assert score.reward == 4.0
    assert score.components == {"f": 3.5, "g": 3.0}
    assert score.success  # 6.5 in all


@pytest.mark.parametrize("parts", [[1.0], {"3": 1.0}, {3: "high"}, {True: 1.0}])
def test_parts_are_places_and_numbers(parts: object) -> None:
    with pytest.raises(RewardError, match="'part_rewards' as"):
        read("f", {"reward": 1.0, "part_rewards": parts})
