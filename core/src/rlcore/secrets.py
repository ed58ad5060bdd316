"""Secrets, such as API keys: masking them in what is written, and keeping them from programs of others."""

import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from rlcore.schema.problem import Problem

MASK = "***"
"""What stands for a secret."""
MIN_CHARACTERS = 8
"""Shortest value of a variable that is masked wherever it stands: a shorter one is part of ordinary words."""

MIN_KEPT = 4
"""Shortest value that is masked as a word of its own."""

_TOKENS = "access|api|auth|bearer|gh|github|gitlab|hf|hub|id|refresh|secret|session"
_SECRET = (
    r"api[_-]?key|access[_-]?key(?:[_-]?id)?|secret(?:[_-]?key)?|private[_-]?key|password|passwd|passphrase|credentials?"
    rf"|authorization|(?:{_TOKENS})[_-]?token"
)
_NAME = re.compile(rf"(?i)(?:.*[_.-])?(?:{_SECRET})|token")
_VARIABLE = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|PAT|AUTH|CREDENTIALS?)(?:_.*)?")
"""Names of environment variables, in which a token is none of a language model's."""
_NO_SECRET = re.compile(r"[/~].*|[0-9.]*")
"""Values of such variables that are none, such as a path."""
_LOGIN = re.compile(r"(?<=://)[^/\s'\"@]+(?=@)")
_FORMATS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?<=Bearer )[\w.~+/=-]{8,}"
)
"""Keys that tell by their form what they are."""
_ASSIGNED = re.compile(
    rf"(?i)(--[\w-]{{0,80}}?(?:{_SECRET}|token)(?:=|\s+)"
    rf"|(?<![\w.-])[\w.-]{{0,80}}?(?:{_SECRET})(?:['\"]?\s*:\s*(?=['\"])|\s*=\s*))"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\",;&}\]]+)"
)
"""What a name of secrets is given: "--api-key VALUE", "api_key=VALUE", '"api_key": "VALUE"'."""
_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|PWD|HOSTNAME|LANG|LANGUAGE|LC_.*|XDG_.*|(?i:(?:http|https|all|no)_proxy)"
    r"|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE|LD_.*|DYLD_.*|PYTHON.*|VIRTUAL_ENV|CONDA_.*|(?:OMP|MKL|OPENBLAS)_.*"
    r"|(?:CUDA|NVIDIA|TORCH|PYTORCH|TRITON|NCCL|HF|TRANSFORMERS|TOKENIZERS|RLCORE)_.*"
)
"""Variables that programs need to start, to find files and devices, and to speak a language."""

_kept: set[str] = set()


def keep_secret(value: str) -> str:
    """`value`, which `masked` masks from now on, unless it is so short that words would vanish."""
    if len(value) >= MIN_KEPT:
        _kept.add(value)
    return value


def is_secret_name(name: str) -> bool:
    """Whether what has this name, a key of a recipe or a variable of the environment, is a secret."""
    return _NAME.fullmatch(name) is not None or (name.isupper() and _VARIABLE.fullmatch(name) is not None)


def masked(text: str) -> str:
    """A message, or a file's text, with MASK in place of secrets."""
    return _ASSIGNED.sub(rf"\g<1>{MASK}", _without_values(text))


def masked_arguments(arguments: Iterable[str]) -> str:
    """A command line in one line, as `masked`."""
    return masked(" ".join(arguments))


def masked_traceback(error: BaseException) -> str:
    """An error's traceback, as `masked`."""
    return masked("".join(traceback.format_exception(error)))


def masked_table(value: Any, name: str = "") -> Any:
    """Nested tables, as of a recipe, with MASK in place of secrets."""
    if isinstance(value, Mapping):
        return {key: masked_table(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        found = [masked_table(one, name) for one in value]
        for place, one in enumerate(found):
            if isinstance(one, str) and one.startswith("--"):
                found[place] = masked(one)
                if is_secret_name(one[2:]) and found[place + 1 : place + 2]:
                    found[place + 1] = MASK
        return found
    if not isinstance(value, str) or not value:
        return value
    return MASK if is_secret_name(name) else _without_values(value)


def masked_keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys for secrets, such as "environment.mine.api_key", at which MASK stands in place of one."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from masked_keys(value, f"{prefix}{name}.")
        elif value == MASK and is_secret_name(str(name)):
            yield f"{prefix}{name}"


def child_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """The variables for a program of others: those that programs need, and these. Secrets are passed by name alone."""
    named = set(names)
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (_USUAL.fullmatch(name) and not is_secret_name(name) and not _LOGIN.search(value))
    }


def unset_problems(section: str, names: Iterable[str]) -> list[Problem]:
    """What is wrong with a section's `pass_environment`: variables that are not set."""
    path, expected = f"{section}.pass_environment", "a variable of the environment"
    return [
        Problem(path=path, found=f"{name}, which is not set", expected=expected) for name in names if name not in os.environ
    ]


def _without_values(text: str) -> str:
    values = [re.escape(one) if len(one) >= MIN_CHARACTERS else rf"(?<!\w){re.escape(one)}(?!\w)" for one in _forms()]
    if values:
        text = re.sub("|".join(sorted(values, key=len, reverse=True)), MASK, text)
    return _FORMATS.sub(MASK, _LOGIN.sub(MASK, text))


def _forms() -> Iterator[str]:
    """The secrets that this process knows, as they stand in texts, addresses and JSON."""
    for value in {*_kept, *_of_environment(), *_of_command_line()}:
        yield from {value, quote(value, safe=""), json.dumps(value)[1:-1]}


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= MIN_CHARACTERS and not _NO_SECRET.fullmatch(value):
            yield value


def _of_command_line() -> Iterator[str]:
    """What stands on the command line behind an option for secrets, or in an override of such a key."""
    before = ""
    for argument in sys.argv[1:]:
        name, assigned, value = argument.partition("=")
        if assigned and is_secret_name(name.lstrip("-")):
            yield value.strip("'\"") or argument
        elif before.startswith("--") and is_secret_name(before[2:]):
            yield argument
        before = argument
