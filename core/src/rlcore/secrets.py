"""Mask secrets, such as API keys, in text that is written, and keep them out of the environment of child processes."""

import base64
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from rlcore.schema.problem import Problem

MASK = "***"
"""Replacement for a secret."""
MIN_CHARACTERS = 8
"""Shortest value of a variable that is masked anywhere in a text: shorter values occur within ordinary words."""

MIN_KEPT = 4
"""Shortest value that is masked where it is a whole word."""

_TOKENS = "access|api|auth|bearer|gh|github|gitlab|hf|hub|id|refresh|sas|secret|security|session"
_SECRET = (
    r"api[_-]?keys?|access[_-]?keys?(?:[_-]?id)?|secrets?(?:[_-]?keys?)?|(?:private|signing|encryption|license|ssh)[_-]?key"
    r"|(?:account|anthropic|auth|azure|consumer|gemini|hf|judge|master|open[_-]?ai|shared|subscription)[_-]?key"
    r"|shared[_-]?access[_-]?signature"
    r"|passwords?|passwd|passphrase|passcode|credentials?|connection[_-]?string|webhook[_-]?url"
    rf"|(?:proxy[_-]?)?authorization|cookies?|(?:{_TOKENS})[_-]?token"
)
_NAME = re.compile(
    rf"(?i)(?:.*[_.-]|.*(?=api_?key|access_?key|password|secret))?(?:{_SECRET})|token|bearer|jwt|(?!(?-i:PWD)\Z)(?:.*[_.-])?pwd"
)
_VARIABLE = re.compile(
    r"(?:.*_)?(?:API_?KEYS?|KEY|TOKEN|SECRETS?|PASS|PAT|AUTH|CREDENTIALS?|DSN|COOKIE|CONNECTION_STRING|JWT|WEBHOOK)(?:_.*)?"
    r"|.*(?:PASSWORD|PASSWD|PASSPHRASE|SSHPASS|SECRET)(?:_.*)?"
)
"""Names of environment variables with secrets. Here TOKEN is a secret; in a recipe it may be a language model's."""
_NO_SECRET = re.compile(r"[/~].*|[0-9.]*")
"""Values of such variables that are no secrets: paths and numbers."""
_PLACEHOLDER = re.compile(r"(?i)none|null|empty|dummy|test|true|false")
"""Values that users set as a key where the server asks for none."""
_LOGIN = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_QUERY = re.compile(
    r"(?i)((?:[?&]|&amp;)(?:[\w.-]{0,80}(?:key|token|secret|signature|password|auth|credential)|sig|pwd|code)=)[^&\s'\"#)>\]]+"
)
"""Secrets in the query of an address, such as `?key=VALUE`."""
_FORMATS = re.compile(
    r"\b(?:sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{10,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|gsk_[A-Za-z0-9]{16,}|xai-\w{16,}|nvapi-[\w-]{16,}|pypi-[\w-]{32,}|r8_[A-Za-z0-9]{16,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|dop_v1_\w{32,}|pplx-\w{32,}|tgp_v1_[\w-]{16,}|fw_[A-Za-z0-9]{20,}|whsec_[\w+/=]{16,}"
    r"|AGE-SECRET-KEY-1[0-9A-Z]{20,}|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|\d{8,10}:[\w-]{35})"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=Bearer )[\w.~+/=-]{8,}|(?<=bearer )(?=[a-zA-Z.~+/=-]*\d)[\w.~+/=-]{8,}"
    r"|(?<=Digest )\w{1,20}=[^\r\n]+|(?<=AWS4-HMAC-SHA256 )Credential=[^\r\n'\"]+"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
    r"|(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END[A-Z -]*|\Z))"
)
"""Keys that have the known form of a provider, such as `sk-…`, of a header, or of a PEM block."""
_VALUE = (
    r"(?:[bfru]{0,2}(?:'''.*?'''|\"\"\".*?\"\"\"|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|\\+['\"][^'\"\\]*"
    r"|\w{0,40}\([^()]{0,400}\)|\[[^\[\]]{0,400}\]|\{[^{}]{0,400}\}|[^\s'\",;&}\]<]+)"
)
"""A value behind a name: a quoted text, a call, a list, a table or a word."""
_ASSIGNED = re.compile(
    rf"(?i)((?<![\w-])--[\w-]{{0,80}}?(?:{_SECRET}|token)(?:=|\s+)|\(b?['\"][\w.-]{{0,80}}?(?:{_SECRET})['\"],\s*"
    r"|(?<![\w.-])(?-i:[A-Z][A-Z0-9_]{0,80}_(?:KEY|TOKEN|SECRET|PASS|PAT|AUTH|DSN|WEBHOOK)(?:['\"]\]\s?)?=\s?)"
    rf"|(?<![\w.-])[\w.-]{{0,80}}?(?:{_SECRET})(?:>|%3D|\\*['\"]?\]?\s*(?:=>|:=|[:=])\s*)"
    r"(?:(?:basic|bearer|digest|token|apikey)\s+|[|>][+-]?\s*\n\s*)?)"
    r"(?!found |expected |(?:basic|bearer|digest|token|apikey)\s)" + _VALUE
)
"""Assignments to a secret's name: "--api-key VALUE", "api_key=VALUE", '"api_key": "VALUE"', "x-api-key: VALUE",
"('X-Api-Key', 'VALUE')", "MY_TOKEN=VALUE"."""
_SAID = re.compile(
    r"(?i)((?<![\w.-])(?:(?:token|pwd)['\"]?\s?[:=]\s?|(?:api[ _-]?key|token|password)(?: provided)?:?\s)['\"]?)"
    r"(?=[a-z+/=_-]*\d)(?=[\d+/=_-]*[a-z])[\w+=-][\w+/=-]{7,}(?!\w|\.\w)"
)
"""Values with letters and digits behind words that name other things too: "token=VALUE", "invalid API key 'VALUE'"."""
_COOKIES = re.compile(r"(?i)(?<![\w.-])((?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?)(?=[^\s=]{1,200}=)[^'\"\r\n]+")
"""All cookies of a header."""
_SCHEME = re.compile(r"(?i)\A(?:basic|bearer|digest|token|apikey)\s+")
"""The word before the secret in a header's value."""
_ARGUMENT = re.compile(r"(?:--)?([\w.-]+)(=|:\s?)(?=\S)")
"""The beginning of an argument "--api-key=VALUE", "API_KEY=VALUE", or "X-Api-Key: VALUE" of a command."""
_MASKED = re.compile(r"(?:\A--[\w-]+|[?&][\w.-]+)=\*{3}|://\*{3}@")
"""Texts of a recipe in which MASK replaces a secret."""
_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|PWD|HOSTNAME|LANG|LANGUAGE|LC_.*|XDG_.*|(?i:(?:http|https|all|no)_proxy)"
    r"|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE|LD_.*|DYLD_.*|PYTHON.*|VIRTUAL_ENV|CONDA_.*|(?:OMP|MKL|OPENBLAS)_.*"
    r"|(?:CUDA|NVIDIA|TORCH|PYTORCH|TRITON|NCCL|HF|TRANSFORMERS|TOKENIZERS|RLCORE)_.*"
)
"""Variables that programs need to start, to find files and devices, and to choose a language."""

_kept: set[str] = set()


def keep_secret(value: str) -> str:
    """Return `value`, and have `masked` mask it from now on. Short values and placeholders such as "none" stay visible."""
    if len(value) >= MIN_KEPT and not _PLACEHOLDER.fullmatch(value):
        _kept.add(value)
    return value


def keep_secrets(table: Mapping[str, Any]) -> None:
    """Call `keep_secret` for each value under a secret's name in nested tables, such as a recipe."""
    for name, value in table.items():
        for _, _, secret in _of_arguments(value) if isinstance(value, list) else ():
            keep_secret(secret)
        if isinstance(value, Mapping):
            keep_secrets(value)
        for one in value if isinstance(value, list) else [value]:
            for secret in _of_login(one) if isinstance(one, str) else ():
                keep_secret(secret)
            if isinstance(one, Mapping):
                keep_secrets(one)
            elif is_secret_name(name) and isinstance(one, str | int | float) and not isinstance(one, bool):
                keep_secret(str(one))


def is_secret_name(name: str) -> bool:
    """Return whether a key of a recipe, or an environment variable, of this name holds a secret."""
    return _NAME.fullmatch(name) is not None or (name.isupper() and _VARIABLE.fullmatch(name) is not None)


def masked(text: str) -> str:
    """Return a text with MASK in place of secrets."""
    text = _without_values(text)
    for pattern in (_SAID, _COOKIES, _ASSIGNED):
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def masked_arguments(arguments: Iterable[str]) -> str:
    """Return a command line as one line, with MASK in place of secrets."""
    return masked(" ".join(arguments))


def masked_traceback(error: BaseException) -> str:
    """Return an error's traceback with MASK in place of secrets."""
    return masked("".join(traceback.format_exception(error)))


def masked_table(value: Any, name: str = "") -> Any:
    """Return nested tables, such as a recipe, with MASK in place of secrets."""
    if isinstance(value, Mapping):
        return {key: masked_table(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        found = [masked_table(one, name) for one in value]
        for place, one in enumerate(found):
            if isinstance(one, str) and one.startswith("--"):
                found[place] = masked(one)
        for place, before, _ in _of_arguments(value):
            found[place] = f"{before}{MASK}"
        return found
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if is_secret_name(name) and len(str(value)) >= MIN_KEPT else value
    if not isinstance(value, str) or not value:
        return value
    return MASK if is_secret_name(name) else _without_values(value)


def masked_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield each key of a recipe at which MASK replaces a secret, such as "environment.mine.api_key" or "agent.command[2]"."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from masked_keys(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        arguments = {place for place, _, secret in _of_arguments(value) if secret == MASK}
        for place, one in enumerate(value):
            is_masked = place in arguments or (one == MASK and is_secret_name(key.rpartition(".")[2]))
            yield from [f"{key}[{place}]"] if is_masked else masked_keys(one, f"{key}[{place}]")
    elif isinstance(value, str) and (_MASKED.search(value) or (value == MASK and is_secret_name(key.rpartition(".")[2]))):
        yield key


def child_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a child process: variables that every program needs, and those of `names`.

    A secret is passed only where `names` lists its variable.
    """
    named = set(names)
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (_USUAL.fullmatch(name) and not is_secret_name(name) and not _LOGIN.search(value))
    }


def unset_problems(section: str, names: Iterable[str]) -> list[Problem]:
    """Return a problem for each variable of a section's `pass_environment` that is not set."""
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
    """Yield the secrets that this process knows, as written in texts, addresses and JSON."""
    known = _known()
    for value in known | {word for one in known if len(word := _SCHEME.sub("", one)) >= MIN_KEPT}:
        yield from {value, quote(value), quote(value, safe=""), repr(value)[1:-1]}
        for is_ascii in (True, False):
            written = json.dumps(value, ensure_ascii=is_ascii)[1:-1]
            yield from {written, json.dumps(written)[1:-1]}  # an endpoint may quote an answer of another one


def _of_arguments(values: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the secrets of a command: the place of each in the list, the text before it, and the secret."""
    before = ""
    for place, one in enumerate(map(str, values)):
        match = _ARGUMENT.match(one)
        if match and is_secret_name(match[1]) and (match[2] == "=" or before.startswith("-")):
            yield place, match.group(), one[match.end() :]
        elif before.startswith("--") and is_secret_name(before[2:]):
            yield place, "", one
        before = one


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= MIN_CHARACTERS and not _NO_SECRET.fullmatch(value):
            yield value
        yield from (one for one in _of_login(value) if len(one) >= MIN_KEPT)


def _of_login(text: str) -> Iterator[str]:
    """Yield the passwords of the URLs in a text, and each login as HTTP's Basic scheme writes it."""
    for match in _LOGIN.finditer(text) if "://" in text else ():
        user, _, password = unquote(match.group()).partition(":")
        yield password or user
        yield base64.b64encode(f"{user}:{password}".encode()).decode()


def _of_command_line() -> Iterator[str]:
    """Yield the secrets of the command line: values of options such as `--api-key`, and of overrides of such keys."""
    before = ""
    for argument in sys.argv[1:]:
        yield from _of_login(argument)
        name, assigned, value = argument.partition("=")
        if assigned and is_secret_name(name.lstrip("-")):
            yield value.strip("'\"") or argument
        elif before.startswith("--") and is_secret_name(before[2:]):
            yield argument
        before = argument
