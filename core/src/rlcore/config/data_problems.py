"""Checks the section of a data set, or of several data sets in one split."""

from collections.abc import Iterator
from pathlib import Path

import attrs

from rlcore.config.data import DatasetConfig, RowsConfig
from rlcore.config.recipe import Recipe
from rlcore.schema import describe
from rlcore.spi import Problem, installed_data_sources, source_of_suffix

NO_FILES = {"environment": "the environment makes", "python": "a program brings"}
"""Sources of rows that are read from nowhere, with who brings the rows."""


def source_problems(path: str, config: DatasetConfig) -> Iterator[Problem]:
    """`source` and the keys that belong to some sources alone. The plan refuses a source that is not installed."""
    suffix = Path(config.path or "").suffix.lower()
    named = source_of_suffix(suffix)
    provider = installed_data_sources().get(config.source)
    if config.source in NO_FILES and config.path is not None:
        yield Problem(
            path=f"{path}.path",
            found=f'{describe.toml_literal(config.path)}, with source = "{config.source}"',
            expected=f"no path, since {NO_FILES[config.source]} these rows, or a source that reads it",
            remedy=f"Set {path}.source to the source that reads {suffix} files."
            if suffix and named is None
            else f'Set {path}.source = "{named or "huggingface"}".',
        )
    elif config.source not in NO_FILES and not (config.path or "").strip():
        is_name = provider is not None and provider.path == "name"
        expected = "the name of a data set" if is_name else f"the path of a {config.source} file"
        yield Problem(path=f"{path}.path", found=f'nothing, with source = "{config.source}"', expected=expected)
    elif provider is not None and provider.path == "file" and named is not None and suffix not in provider.suffixes:
        yield Problem(
            path=f"{path}.source",
            found=f'"{config.source}", with the path {config.path}',
            expected="the format that the file's name ends in",
            remedy=f'Set {path}.source = "{named}", or rename the file.',
        )
    for key in ("subset", "split"):
        is_read = provider is not None and key in provider.keys
        if getattr(config, key) is not None and not is_read and (provider is not None or config.source in NO_FILES):
            yield Problem(
                path=f"{path}.{key}",
                found=f'{describe.toml_literal(getattr(config, key))}, with source = "{config.source}"',
                expected="no such key: this source does not read it",
            )


def mix_problems(recipe: Recipe, path: str, config: DatasetConfig) -> Iterator[Problem]:
    """Keys that do nothing beside `mix`, and what its tables cannot say. `path` is the data set's section."""
    for attribute in attrs.fields(RowsConfig):
        value = getattr(config, attribute.name)
        if value != attribute.default:
            yield Problem(
                path=f"{path}.{attribute.name}",
                found=f"{describe.toml_literal(value)}, beside [{path}.mix]",
                expected="no such key: each of the sets there has its own",
                remedy=f"Write it in [{path}.mix.NAME].",
            )
    if not config.mix:
        expected = "a table for each data set"
        yield Problem(path=f"{path}.mix", found="none", expected=expected, remedy=f"Write [{path}.mix.NAME] with a path.")
    for name, rows in (config.mix or {}).items():
        at = f"{path}.mix.{name}"
        twin = (recipe.data.train.mix or {}).get(name, rows)
        if twin.environment != rows.environment:
            expected = f"{describe.toml_literal(twin.environment or 'none')}, as the set of that name in data.train has"
            yield Problem(path=f"{at}.environment", found=describe.toml_literal(rows.environment or "none"), expected=expected)
        if "/" in name or not name.strip():
            yield Problem(path=at, found=f"the name {name!r}", expected="a name without a slash, which metrics are named by")
        if rows.source == "python":
            remedy = "Mix them in the program, or write them to a file."
            yield Problem(path=f"{at}.source", found='"python"', expected="a file, the Hub or an environment", remedy=remedy)
        if rows.weight != 1.0 and path == "data.evaluation":
            expected = "no weight: all held-out rows are measured"
            yield Problem(path=f"{at}.weight", found=f"{rows.weight:g}", expected=expected, remedy="Use limit for fewer.")
        if recipe.environment is None and (rows.environment is not None or rows.source == "environment"):
            key = "source" if rows.environment is None else "environment"
            found = f"{describe.toml_literal(getattr(rows, key))}, without an [environment]"
            remedy = "Set environment.name, the environment of sets that name none."
            yield Problem(path=f"{at}.{key}", found=found, expected="an [environment] beside it", remedy=remedy)
