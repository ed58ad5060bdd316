"""Checks of `[algorithm.sdft]` and `[algorithm.sdpo]`: the fields of their templates."""

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter

from rlcore.spi import CheckContext, Problem
from rlcore_distill.self_config import SdftConfig, SdpoConfig, SelfDistillConfig

_OF_SDFT = {"teacher_prompt_template": ("prompt", "demonstration")}
_OF_SDPO = {
    "reprompt_template": ("prompt", "solution", "feedback"),
    "solution_template": ("successful_previous_attempt",),
    "feedback_template": ("feedback_raw",),
}
"""The fields of each template, all of which it names."""


def check(context: CheckContext, config: SelfDistillConfig) -> Sequence[Problem]:
    """Return the templates that name other fields than they have."""
    del context
    match config:
        case SdftConfig():
            return list(_problems(config, _OF_SDFT))
        case SdpoConfig():
            return list(_problems(config, _OF_SDPO))
    return []


def _problems(config: SelfDistillConfig, templates: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    for key, fields in templates.items():
        expected = f"a text with {' and '.join(f'{{{field}}}' for field in fields)}, in which {{{{ and }}}} are braces"
        try:
            named = {name for _, name, _, _ in Formatter().parse(getattr(config, key)) if name is not None}
        except ValueError as error:
            yield Problem(path=f"{config.section}.{key}", found=f"a template that is none: {error}", expected=expected)
            continue
        if named != {*fields}:
            found = f"a template with {', '.join(f'{{{name}}}' for name in sorted(named)) or 'no field'}"
            yield Problem(path=f"{config.section}.{key}", found=found, expected=expected)
