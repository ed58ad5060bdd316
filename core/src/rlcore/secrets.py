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

_TOKENS = "access|api|auth|bearer|gh|github|gitlab|hf|hub|id|refresh|sas|secret|security|session"
_SECRET = (
    r"api[_-]?keys?|access[_-]?keys?(?:[_-]?id)?|secrets?(?:[_-]?keys?)?|(?:private|signing|encryption|license|ssh)[_-]?key"
    r"|(?:account|auth|consumer|master|shared|subscription)[_-]?key"
    r"|passwords?|passwd|passphrase|passcode|credentials?|connection[_-]?string|webhook[_-]?url"
    rf"|(?:proxy[_-]?)?authorization|cookies?|(?:{_TOKENS})[_-]?token"
)
_NAME = re.compile(rf"(?i)(?:.*[_.-]|.*(?=api_?key|password|secret))?(?:{_SECRET})|token|(?!(?-i:PWD)\Z)(?:.*[_.-])?pwd")
_VARIABLE = re.compile(
    r"(?:.*_)?(?:API_?KEYS?|KEY|TOKEN|SECRETS?|PASS|PAT|AUTH|CREDENTIALS?|DSN|COOKIE|CONNECTION_STRING|WEBHOOK)(?:_.*)?"
    r"|.*(?:PASSWORD|PASSWD|PASSPHRASE|SSHPASS|SECRET)(?:_.*)?"
)
"""Names of environment variables, in which a token is none of a language model's."""
_NO_SECRET = re.compile(r"[/~].*|[0-9.]*")
"""Values of such variables that are none, such as a path."""
_PLACEHOLDER = re.compile(r"(?i)none|null|empty|dummy|test|true|false")
"""What stands for a key where none is asked for."""
_LOGIN = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_QUERY = re.compile(
    r"(?i)((?:[?&]|&amp;)(?:[\w.-]{0,80}(?:key|token|secret|signature|password|auth|credential)|sig|pwd|code)=)[^&\s'\"#)>\]]+"
)
"""What an address has behind its question mark."""
_FORMATS = re.compile(
    r"\b(?:sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{10,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|gsk_\w{16,}|xai-\w{16,}|nvapi-[\w-]{16,}|pypi-[\w-]{32,}|r8_\w{16,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|npm_\w{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|dop_v1_\w{32,}|pplx-\w{32,}|tgp_v1_[\w-]{16,}|fw_[A-Za-z0-9]{20,}|whsec_[\w+/=]{16,}"
    r"|AGE-SECRET-KEY-1[0-9A-Z]{20,}|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END[A-Z -]*|\Z))"
)
"""Keys that tell by their form what they are."""
_ASSIGNED = re.compile(
    rf"(?i)(--[\w-]{{0,80}}?(?:{_SECRET}|token)(?:=|\s+)|\(b?['\"][\w.-]{{0,80}}?(?:{_SECRET})['\"],\s*"
    r"|(?<![\w.-])(?-i:[A-Z][A-Z0-9_]{0,80}_(?:KEY|TOKEN|SECRET|PASS|PAT|AUTH|DSN)=)"
    rf"|(?<![\w.-])[\w.-]{{0,80}}?(?:{_SECRET})\\*['\"]?\s*[:=]\s*"
    r"(?:(?:basic|bearer|digest|token|apikey)\s+)?)(?!found |expected |(?:basic|bearer|digest|token|apikey)\s)"
    r"(?:b?'(?:[^'\\]|\\.)*'|b?\"(?:[^\"\\]|\\.)*\"|\\+['\"][^'\"\\]*|[^\s'\",;&}\]]+)"
)
"""What a name of secrets is given: "--api-key VALUE", "api_key=VALUE", '"api_key": "VALUE"', "x-api-key: VALUE",
"('X-Api-Key', 'VALUE')", "MY_TOKEN=VALUE"."""
_COOKIES = re.compile(r"(?i)(?<![\w.-])((?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?)(?=\S+=)[^'\"\r\n]+")
"""All cookies of a header."""
_MASKED = re.compile(r"(?:\A--[\w-]+|[?&][\w.-]+)=\*{3}|://\*{3}@")
"""Texts of a recipe in which MASK stands for a secret, and is no text of its own."""
_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|PWD|HOSTNAME|LANG|LANGUAGE|LC_.*|XDG_.*|(?i:(?:http|https|all|no)_proxy)"
    r"|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE|LD_.*|DYLD_.*|PYTHON.*|VIRTUAL_ENV|CONDA_.*|(?:OMP|MKL|OPENBLAS)_.*"
    r"|(?:CUDA|NVIDIA|TORCH|PYTORCH|TRITON|NCCL|HF|TRANSFORMERS|TOKENIZERS|RLCORE)_.*"
)
"""Variables that programs need to start, to find files and devices, and to speak a language."""

_kept: set[str] = set()


def keep_secret(value: str) -> str:
    """`value`, which `masked` masks from now on, unless words would vanish with it."""
    if len(value) >= MIN_KEPT and not _PLACEHOLDER.fullmatch(value):
        _kept.add(value)
    return value


def keep_secrets(table: Mapping[str, Any]) -> None:
    """`keep_secret` for each value of nested tables, as of a recipe, whose name is a secret's."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            keep_secrets(value)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                keep_secrets(one)
            elif is_secret_name(name) and isinstance(one, str | int | float) and not isinstance(one, bool):
                keep_secret(str(one))


def is_secret_name(name: str) -> bool:
    """Whether what has this name, a key of a recipe or a variable of the environment, is a secret."""
    return _NAME.fullmatch(name) is not None or (name.isupper() and _VARIABLE.fullmatch(name) is not None)


def masked(text: str) -> str:
    """A message, or a file's text, with MASK in place of secrets."""
    return _ASSIGNED.sub(rf"\g<1>{MASK}", _COOKIES.sub(rf"\g<1>{MASK}", _without_values(text)))


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
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if is_secret_name(name) and len(str(value)) >= MIN_KEPT else value
    if not isinstance(value, str) or not value:
        return value
    return MASK if is_secret_name(name) else _without_values(value)


def masked_keys(value: Any, key: str = "") -> Iterator[str]:
    """Where MASK stands in a recipe in place of a secret, such as "environment.mine.api_key" or "agent.command[2]"."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from masked_keys(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            before = value[place - 1] if place else ""
            named = before[2:] if isinstance(before, str) and before.startswith("--") else key.rpartition(".")[2]
            yield from masked_keys(one, f"{key}[{place}]") if one != MASK else [f"{key}[{place}]"] * is_secret_name(named)
    elif isinstance(value, str) and (_MASKED.search(value) or (value == MASK and is_secret_name(key.rpartition(".")[2]))):
        yield key


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
    values = [
        re.escape(one) if len(one) >= MIN_CHARACTERS else rf"(?<!\w){re.escape(one)}(?!\w)"
        for one in sorted(_forms(), key=len, reverse=True)
    ]
    for one in _known():
        if len(one) >= 2 * MIN_CHARACTERS and "://" not in one:
            values.append(re.escape(one[: len(one) // 2]) + r"[\w+/=-]*")  # one that was cut off
    if values:
        text = re.sub("|".join(values), MASK, text)
    return _FORMATS.sub(MASK, _QUERY.sub(rf"\g<1>{MASK}", _LOGIN.sub(MASK, text)))


def _known() -> set[str]:
    return {*_kept, *_of_environment(), *_of_command_line()}


def _forms() -> Iterator[str]:
    """The secrets that this process knows, as they stand in texts, addresses and JSON."""
    for value in _known():
        yield from {value, quote(value), quote(value, safe=""), repr(value)[1:-1]}
        yield from {json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}


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
