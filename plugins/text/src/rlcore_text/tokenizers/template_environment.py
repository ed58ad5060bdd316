"""The Jinja environment of chat templates: bounded operators and a fixed date."""

from datetime import date
from functools import cache
from typing import Any

TODAY = date(2024, 7, 26)
"""Fixed date for templates that ask for today, so that prompts are the same on each day of a run. Llama's templates have the
same default."""
MAX_ITEMS = 2**24
"""Most characters or items that `*` makes at once."""
MAX_BITS = 2**16
"""Most bits of a product or a power."""


def require_bounded(operator: str, left: object, right: object) -> None:
    """Raise an OverflowError where `*` or `**` of these would be larger than any chat template needs."""
    for one, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(one, str | list | tuple) and isinstance(times, int) and len(one) * times > MAX_ITEMS:
            raise OverflowError(f"found {times} times {len(one)} items or characters; expected at most {MAX_ITEMS}")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 0)
        if bits > MAX_BITS:
            raise OverflowError(f"found a number of {bits} bits; expected at most {MAX_BITS}")


@cache
def replace_environment() -> None:
    """Let transformers compile chat templates in this environment."""
    from transformers.utils import chat_template_utils

    if not hasattr(chat_template_utils, "ImmutableSandboxedEnvironment"):
        return  # jinja2 is missing, which transformers says in its own words

    class TemplateEnvironment(chat_template_utils.ImmutableSandboxedEnvironment):  # type: ignore[misc]
        # Huge results of these would block the process, and no timeout could end them.
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            require_bounded(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def from_string(self, *arguments: Any, **options: Any) -> Any:
            # transformers has set the clock's by now, and from 5.20 on takes no functions as variables of a template.
            self.globals["strftime_now"] = TODAY.strftime
            return super().from_string(*arguments, **options)

    chat_template_utils.ImmutableSandboxedEnvironment = TemplateEnvironment
