"""What runs were given, key by key, and where they differ."""

from rlcore_report.configurations import differences, flat


def test_tables_become_keys() -> None:
    recipe = {"a": {"b": {"c": 1, "d": "x"}}, "e": [1, 2]}
    assert dict(flat(recipe)) == {"a.b.c": "1", "a.b.d": "'x'", "e": "[1, 2]"}


def test_only_what_differs_is_told_and_not_where_a_run_lies() -> None:
    recipes = [{"a": "1", "b": "2", "run.name": "'x'"}, {"a": "1", "b": "3", "c": "4", "run.name": "'y'"}, {"a": "1", "b": "2"}]
    assert differences(recipes) == [("b", ["2", "3", "2"]), ("c", ["none", "4", "none"])]
