"""The parts of rewards as columns."""

import numpy as np

from rlcore_rollout.episode_group import reward_components


def test_a_column_has_0_where_an_episode_has_no_such_part_and_where_it_is_masked() -> None:
    valid = np.array([True, True, False])
    found = reward_components([{"b": 2.0}, {"a": 1.0, "b": -3.0}, {"a": 9.0, "c": 9.0}], valid)
    assert {name: column.tolist() for name, column in found.items()} == {
        "a": [0.0, 1.0, 0.0],
        "b": [2.0, -3.0, 0.0],
        "c": [0.0, 0.0, 0.0],
    }
    assert list(found) == ["a", "b", "c"]
    assert {column.dtype for column in found.values()} == {np.dtype(np.float32)}


def test_episodes_without_parts_have_no_columns() -> None:
    assert reward_components([{}, {}], np.ones(2, np.bool_)) == {}
    assert reward_components([], np.ones(0, np.bool_)) == {}
