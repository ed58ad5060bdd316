"""What chat templates are told, and what they may not pass over."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlcore.config.model import ModelConfig
from rlcore.run.data import chat_template
from rlcore.run.data.chat_template import TODAY, with_defaults
from rlcore.run.data.tokenizer import PretrainedTokenizer, load_tokenizer
from rlcore.spi import DataError
from rlcore.testing.models import make_tokenizer

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TOOL = {"type": "function", "function": {"name": "look"}}
KNOWN = "{% for m in messages %}{% if m.role in ('user', 'assistant') or (m.role == 'system' and loop.first) %}{{ m.content }};"
KNOWN += "{% endif %}{% endfor %}"
"""Passes over roles that it does not know, as Qwen's and Phi's do, and over later system messages."""
DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return str(path)


@pytest.fixture
def load(directory: str):  # type: ignore[no-untyped-def]
    return lambda template: load_tokenizer(ModelConfig(path=directory, chat_template=template))


@pytest.mark.parametrize(
    ("role", "before"),
    [("developer", []), ("tool", [USER, ASSISTANT]), ("environment", [USER, ASSISTANT]), ("system", [USER])],
)
def test_a_role_that_the_template_passes_over_is_refused(load, role: str, before: list[dict[str, str]]) -> None:  # type: ignore[no-untyped-def]
    message = {"role": role, "content": "be brief"}
    tokenizer: PretrainedTokenizer = load(KNOWN)
    for _ in range(2):
        with pytest.raises(DataError, match=f"role '{role}'{' behind' if before else '. Give'}"):
            tokenizer.render_chat([*before, message, USER])
    shows_all = load("{% for m in messages %}{{ m.content }};{% endfor %}")
    assert "be brief;" in shows_all.render_chat([*before, message, USER])
    assert load(KNOWN).render_chat([{"role": "system", "content": ""}, USER]) == ";hi;"


def test_a_template_that_looks_into_what_it_is_given_decides_itself(load) -> None:  # type: ignore[no-untyped-def]
    template = (
        "{% for m in messages %}{% if m.content not in ('{}', 'hi') %}{{ raise_exception('no JSON') }}{% endif %}{% endfor %}"
    )
    assert load(template).render_chat([USER, {"role": "tool", "content": "{}"}]) == ""


def test_tools_and_calls_that_the_template_never_shows_are_refused(load) -> None:  # type: ignore[no-untyped-def]
    tokenizer = load(KNOWN)
    with pytest.raises(DataError, match="never shows any"):
        tokenizer.render_chat([USER], [TOOL])
    with pytest.raises(DataError, match="tool_calls, but"):
        tokenizer.render_chat([USER, ASSISTANT | {"tool_calls": [{"function": {"name": "look"}}]}, USER])


def test_the_date_is_the_same_on_any_day(load) -> None:  # type: ignore[no-untyped-def]
    text = load(DATED).render_chat([USER])
    assert text == f"{TODAY:%d %b %Y}hi"
    assert re.fullmatch(r"26 Jul 2024hi", text)


VARIED = (
    "{{ think }}|{{ mood }}|{{ depth }};{% for m in messages %}{% if think %}{{ mood }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_defaults_written_into_a_template_are_what_its_variables_say_until_others_are_given(directory: str) -> None:
    variables = {"think": False, "mood": "a \"b\" 'c' {{ é", "depth": -2.5}
    told = load_tokenizer(ModelConfig(path=directory, chat_template=VARIED, chat_template_kwargs=variables))
    written = load_tokenizer(ModelConfig(path=directory, chat_template=with_defaults(VARIED, variables)))
    assert written.render_chat([USER]) == told.render_chat([USER])
    other = {"think": True, "mood": "calm"}
    assert written.with_variables(other).render_chat([USER]) == told.with_variables(other).render_chat([USER])


NUMBERS = "{% for one in range(99999) %}"
ENDLESS = {
    "loops": f"{NUMBERS}{NUMBERS}{NUMBERS}x{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "calls": "{% macro again(n) %}{{ again(n - 1) if n else '' }}{{ again(n - 1) if n else '' }}{% endmacro %}{{ again(60) }}",
    "filters": f"{NUMBERS}{NUMBERS}{{% set x = messages | map(attribute='role') | list %}}{{% endfor %}}{{% endfor %}}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_does_not_end_is_named(load, monkeypatch, template: str, in_thread: bool) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(chat_template, "TEMPLATE_S", 0.2)
    tokenizer = load(template)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match=r"the chat template .* 0\.2 s"), ThreadPoolExecutor(1) as pool:
        if in_thread:
            pool.submit(tokenizer.render_chat, messages).result()
        tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    "template", ["{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "{% for n in range(10 ** 9) %}{% endfor %}"]
)
def test_a_template_that_goes_too_far_is_refused(load, template: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="the chat template refuses"):
        load(template).render_chat([{"role": "user", "content": "a"}])
