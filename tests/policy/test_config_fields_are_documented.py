"""Every option of every recipe section says what it does."""

import ast
import inspect
import textwrap
import types
import typing

import attrs
import pytest

from rlcore.config import recipe
from rlcore.registry.discovery import discover


def config_classes(root_class):
    """A config class and those of its nested sections."""
    yield root_class
    for hint in typing.get_type_hints(root_class).values():
        options = (
            typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
        )
        for option in options:
            if isinstance(option, type) and attrs.has(option):
                yield from config_classes(option)


def plugin_classes():
    for entry in discover().entries:
        assert entry.provider is not None, entry
        yield from config_classes(entry.provider.config)


ALL = sorted({*config_classes(recipe.Recipe), *plugin_classes()}, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


def documented_fields(cls):
    """Names of the fields of a class that a docstring follows."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield statement.target.id


def is_section(cls, name):
    hint = typing.get_type_hints(cls)[name]
    return any(isinstance(option, type) and attrs.has(option) for option in (hint, *typing.get_args(hint)))


def test_plugins_of_every_role_are_looked_at():
    modules = {cls.__module__.partition(".")[0] for cls in ALL}
    assert {
        "rlcore",
        "rlcore_fsdp2",
        "rlcore_megatron",
        "rlcore_mlx",
        "rlcore_transformers",
        "rlcore_openai",
        "rlcore_grpo",
        "rlcore_sft",
        "rlcore_dpo",
        "rlcore_ppo",
        "rlcore_reward_model",
        "rlcore_distill",
        "rlcore_math",
        "rlcore_shapes",
        "rlcore_code",
        "rlcore_reasoning_gym",
        "rlcore_textarena",
        "rlcore_verifiers",
        "rlcore_openenv",
        "rlcore_harbor",
        "rlcore_mcp",
        "rlcore_nemo_gym",
    } <= modules


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_field_has_a_docstring_beneath_it(cls):
    """A section's own class docstring speaks for it; an inherited field is documented where it is defined."""
    documented = {name for base in cls.__mro__ if attrs.has(base) and base is not object for name in documented_fields(base)}
    missing = [field.name for field in attrs.fields(cls) if field.name not in documented and not is_section(cls, field.name)]
    assert not missing, f"{cls.__qualname__}: {', '.join(missing)}"
    assert cls.__doc__, cls.__qualname__


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_config_class_is_frozen_and_keyword_only(cls):
    assert all(field.kw_only for field in attrs.fields(cls))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        object.__new__(cls).anything = 1
