"""Mask secrets, such as API keys, in text that is written, and keep them out of the environment of child processes."""

import base64
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from html.entities import codepoint2name
from typing import Any
from urllib.parse import unquote

from rlcore.schema.printable import class_name
from rlcore.schema.problem import Problem
from rlcore.secret_forms import ALWAYS, COMMANDS, FORMATS, IN_MESSAGES, LOGIN, SECRET

MASK = "***"
"""Replacement for a secret."""
MIN_CHARACTERS = 8
"""Shortest value of a variable that is masked anywhere in a text: shorter values occur within ordinary words."""

MIN_KEPT = 4
"""Shortest value that is masked where it is a whole word."""

_NAME = re.compile(
    rf"(?i)(?:.*[_.-]|.*(?=api_?key|access_?key|password|secret))?(?:{SECRET})|token|bearer|jwt|(?!(?-i:PWD)\Z)(?:.*[_.-])?pwd"
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
_SCHEME = re.compile(r"(?i)\A(?:basic|bearer|digest|token|apikey)\s+")
"""The word before the secret in a header's value."""
_ARGUMENT = re.compile(r"(?:--)?([\w.-]+)(=|:\s?)(?=\S)")
"""The beginning of an argument "--api-key=VALUE", "API_KEY=VALUE", or "X-Api-Key: VALUE" of a command."""
_MASKED = re.compile(r"(?:\A--[\w-]+|[?&][\w.-]+)=\*{3}|://\*{3}@|\s-{1,2}[\w-]+(?:[ =]['\"]?(?:[^\s'\"]+[:,%])?)?\*{3}")
"""Texts of a recipe in which MASK replaces a secret."""
_ENTITIES = codepoint2name | {ord("'"): "apos"}
_ESCAPED = {"\n": "n", "\t": "t", "\r": "r", "\b": "b", "\f": "f"}
"""Letters behind a backslash that stand for characters."""
_LINE_END = r"(?:\\{1,16}[rn]|%(?:25)*+0[AaDd]|[\r\n])(?:\\{1,16}[rnt]|%(?:25)*+(?:0[9AaDd]|20)|\s)*+"
_LINE = r"(?:[\w+/=-]|%(?:25)*+(?:2[BbFf]|3[Dd])|\\{1,16}/)++"
_LINES = re.compile(rf"(?<![\w+/=-]){_LINE}(?:{_LINE_END}{_LINE})+")
"""An encoded text over several lines, as base64 has after 64 or 76 characters. JSON and addresses write their ends, too."""
_BETWEEN = "\x1f"
"""Unit separator between the arguments of a command."""
_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|PWD|HOSTNAME|LANG|LANGUAGE|LC_.*|XDG_.*|(?i:(?:http|https|all|no)_proxy)"
    r"|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE|LD_.*|DYLD_.*|PYTHON.*|VIRTUAL_ENV|CONDA_.*|(?:OMP|MKL|OPENBLAS)_.*"
    r"|(?:CUDA|NVIDIA|TORCH|PYTORCH|TRITON|NCCL|HF|TRANSFORMERS|TOKENIZERS|RLCORE)_.*"
)
"""Variables that programs need to start, to find files and devices, and to choose a language."""

kept_secrets: set[str] = set()
"""Values that `keep_secret` was called with in this process."""


def keep_secret(value: str) -> str:
    """Return `value`, and have `masked` mask it from now on. Short values and placeholders such as "none" stay visible."""
    if len(value) >= MIN_KEPT and not _PLACEHOLDER.fullmatch(value):
        kept_secrets.add(value)
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
            for start, end in _of_programs(one) if isinstance(one, str) else ():
                keep_secret(one[start:end])
            if isinstance(one, Mapping):
                keep_secrets(one)
            elif is_secret_name(name) and isinstance(one, str | int | float) and not isinstance(one, bool):
                keep_secret(str(one))


@lru_cache(maxsize=4096)  # all variables of the environment are asked about for each text that is masked
def is_secret_name(name: str) -> bool:
    """Return whether a key of a recipe, or an environment variable, of this name holds a secret."""
    return _NAME.fullmatch(name) is not None or (name.isupper() and _VARIABLE.fullmatch(name) is not None)


def masked(text: str) -> str:
    """Return a text with MASK in place of secrets."""
    text = _without_values(text)
    return _without_forms(text, IN_MESSAGES)


def masked_traceback(error: BaseException) -> str:
    """Return an error's traceback with MASK in place of secrets."""
    try:
        lines = traceback.format_exception(error)
    except Exception:  # by a metaclass that hides the names of its class
        lines = [*traceback.format_tb(error.__traceback__), class_name(error)]
    return masked("".join(lines))


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
        if name in named or (_USUAL.fullmatch(name) and not is_secret_name(name) and not LOGIN.search(value))
    }


def unset_problems(section: str, names: Iterable[str]) -> list[Problem]:
    """Return a problem for each variable of a section's `pass_environment` that is not set."""
    path, expected = f"{section}.pass_environment", "a variable of the environment"
    return [
        Problem(path=path, found=f"{name}, which is not set", expected=expected) for name in names if name not in os.environ
    ]


def _without_values(text: str) -> str:
    known = _pattern_of(frozenset(_known()))
    text = _LINES.sub(lambda found: MASK if known.search(re.sub(_LINE_END, "", found[0])) else found[0], known.sub(MASK, text))
    return FORMATS.sub(MASK, _without_forms(LOGIN.sub(MASK, text), ALWAYS))


@lru_cache(maxsize=8)
def _pattern_of(known: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern of these secrets in any spelling, and of the beginnings of those that were cut off."""
    values = known | {word for one in known if len(word := _SCHEME.sub("", one)) >= MIN_KEPT}
    patterns = [_spelled(one) for one in sorted(values, key=len, reverse=True)]
    patterns += (
        re.escape(one[: len(one) // 2]) + r"[\w+/=-]*" for one in known if len(one) >= 2 * MIN_CHARACTERS and "://" not in one
    )
    return re.compile("|".join(patterns) or r"(?!)")


def _without_forms(text: str, patterns: Iterable[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def _known() -> set[str]:
    found = {*_of_environment(), *_of_command_line()}
    return kept_secrets | {one for one in found if len(one) >= MIN_KEPT and not _PLACEHOLDER.fullmatch(one)}


def _spelled(value: str) -> str:
    """Return a pattern of a secret as texts, addresses, JSON, HTML, Python and shells write it, encoded once or twice, and of
    its base64 and hexadecimal forms within longer ones."""
    pattern = "".join(map(_spelled_character, re.findall(r"\\+|[^\\]", value)))
    if len(value) < MIN_CHARACTERS:
        return rf"(?<!\w){pattern}(?!\w)"
    content = value.encode(errors="surrogatepass")
    forms = [pattern, f"(?i:{content.hex()})"]
    for shift in range(3):  # base64 writes three bytes as four characters, wherever the secret begins
        encoded = base64.b64encode(bytes(shift) + content).decode()
        inner = encoded[(8 * shift + 5) // 6 : 8 * (shift + len(content)) // 6]
        inner = inner.replace("/", r"(?:\\{0,16}/|_|%(?:25)*2[Ff])").replace("+", r"(?:\+|-|%(?:25)*2[Bb])")
        forms.append(rf"{inner}[\w+/-]?(?:=|%(?:25)*3[Dd])*")
    return "|".join(forms)


def _spelled_character(character: str) -> str:
    """Return a pattern of one character of a secret, or of a run of backslashes. The numbers of backslashes have a bound: each
    one of a text may begin a match."""
    if character.isascii() and character.isalnum():
        return character
    count, character = len(character), character[0]
    code, content = ord(character), character.encode(errors="surrogatepass")
    units = re.findall("....", character.encode("utf-16-be", errors="surrogatepass").hex())
    forms = [
        "".join(rf"%(?:25)*(?i:{byte:02x})" for byte in content),
        rf"&(?:amp;)?(?:#0*{code}|#[xX]0*(?i:{code:x})|{_ENTITIES.get(code, '(?!)')});",
        "".join(rf"\\{{1,16}}x{byte:02x}" for byte in content),
        rf"\\{{1,16}}(?:x{code:02x}|U{code:08x}|{_ESCAPED.get(character, '(?!)')})",
        "".join(rf"\\{{1,16}}u(?i:{unit})" for unit in units),
    ]
    if character == "\\":
        return rf"(?:\\{{{count},{16 * count}}}|(?:{'|'.join(forms)}){{{count}}})"
    if character == "'":
        forms.append(r"""'(?:\\{1,16}'|"'")'""")  # of a shell
    elif character == " ":
        forms.append(r"\+")  # of a form of HTML
    return rf"(?:\\{{0,16}}{re.escape(character)}|{'|'.join(forms)})"


def _of_arguments(values: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the secrets of a command: the place of each in the list, the text before it, and the secret."""
    line = _BETWEEN.join(map(str, values))
    for start, end in _of_programs(line):
        begin = line.rfind(_BETWEEN, 0, start) + 1
        if end == len(line) or line[end] == _BETWEEN:
            yield line.count(_BETWEEN, 0, begin), line[begin:start], line[start:end]
    before = ""
    for place, one in enumerate(map(str, values)):
        match = _ARGUMENT.match(one)
        if match and is_secret_name(match[1]) and (match[2] == "=" or before.startswith("-")):
            yield place, match.group(), one[match.end() :]
        elif before.startswith("--") and is_secret_name(before[2:]):
            yield place, "", one
        before = one


def _of_programs(line: str) -> Iterator[tuple[int, int]]:
    """Yield the places of the secrets of other programs in a command line."""
    return ((match.end(1), match.end()) for pattern in COMMANDS for match in pattern.finditer(line))


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= MIN_CHARACTERS and not _NO_SECRET.fullmatch(value):
            yield value
        yield from _of_login(value)


def _of_login(text: str) -> Iterator[str]:
    """Yield the passwords of the URLs in a text, and each login as HTTP's Basic scheme writes it."""
    for match in LOGIN.finditer(text) if "://" in text else ():
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
