"""Operators of chat templates have a bound, and their date is fixed."""

import pytest

from rlcore_text.tokenizers.template_environment import MAX_ITEMS, replace_environment, require_bounded


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [("*", "ab", MAX_ITEMS), ("*", MAX_ITEMS + 1, (1,)), ("*", [1], 10**30), ("*", 1 << 60000, 1 << 60000), ("**", 9, 9**9)],
    ids=range(5),
)
def test_what_is_larger_than_any_template_needs_is_refused(operator: str, left: object, right: object) -> None:
    with pytest.raises(OverflowError, match="found .* expected at most"):
        require_bounded(operator, left, right)


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [("*", "-", 80), ("*", [1], -1), ("*", 1e300, 1e300), ("*", "a", "b"), ("**", 2, 64), ("**", 2, -(10**9)), ("**", 0.5, 9)],
    ids=range(7),
)
def test_what_templates_need_is_left_to_jinja(operator: str, left: object, right: object) -> None:
    require_bounded(operator, left, right)


def test_transformers_compiles_templates_with_the_bounds() -> None:
    replace_environment()
    from transformers.utils import chat_template_utils

    environment = chat_template_utils.ImmutableSandboxedEnvironment()  # type: ignore[attr-defined]
    assert environment.from_string("{{ '-' * 3 }}").render() == "---"
    with pytest.raises(OverflowError):
        environment.from_string("{{ '-' * n }}").render(n=10**12)
