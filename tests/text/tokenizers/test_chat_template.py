"""What chat templates are told, and what they may not pass over."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlcore.config.model import ModelConfig
from rlcore.spi import ConfigError, DataError, ModelError
from rlcore_text.tokenizers import chat_template
from rlcore_text.tokenizers.chat_template import named_templates, with_defaults, write_templates
from rlcore_text.tokenizers.template_environment import TODAY
from rlcore_text.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer

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


SHOWS_ALL = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


CALLED = {"function": {"name": "look", "arguments": {}}}


@pytest.mark.parametrize(
    ("messages", "most"),
    [
        ([USER | {"role": f"user_{number}"} for number in range(32)], 64),
        ([USER, ASSISTANT] * 300, 8),
        ([USER, ASSISTANT | {"tool_calls": [CALLED] * 300}, USER], 8),
        ([USER | {"role": f"user_{number}"} for number in range(33)], "have 33 different roles"),
        ([USER | {"role": "user_1" * 11}], "a role of 66 characters"),
    ],
)
def test_the_renderings_of_a_conversation_are_bounded(load, messages: list[object], most: int | str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    tokenizer, num_rendered = load(SHOWS_ALL + "{{ messages[1].tool_calls }}"), [0]
    render = tokenizer.backend.apply_chat_template

    def counted(*args: object, **options: object) -> object:
        num_rendered[0] += 1
        return render(*args, **options)

    monkeypatch.setattr(tokenizer.backend, "apply_chat_template", counted)
    if isinstance(most, str):
        with pytest.raises(DataError, match=most):
            tokenizer.render_chat(messages)
    else:
        tokenizer.render_chat(messages)
        assert 0 < num_rendered[0] <= most + 1


def test_many_unknown_variables_are_refused_in_a_short_text(load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="and 19992 more") as caught:
        load(SHOWS_ALL).with_variables({f"unknown_{number}": 1 for number in range(20_000)})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        *(("Assistant", "assistant"), ("assitant", "assistant"), ("users", "user"), ("USER ", "user"), ("systm", "system")),
        *(("tools", "tool"), ("Tool_Call", "tool_call")),
        *(("user_1", ""), ("assistant2", ""), ("narrator", ""), ("ipython", ""), ("developer", "")),
    ],
)
def test_a_slip_in_a_role_is_refused_unless_the_template_names_the_role(load, role: str, meant: str) -> None:  # type: ignore[no-untyped-def]
    messages = [USER, {"role": role, "content": "a"}]
    if meant:
        with pytest.raises(DataError, match=f"the role '{role}'.*Did you mean '{meant}'"):
            load(SHOWS_ALL).render_chat(messages)
    named = SHOWS_ALL + f"{{% if messages[0].role == '{role}' %}}!{{% endif %}}"
    assert load(named if meant else SHOWS_ALL).render_chat(messages) == f"user:hi;{role}:a;"


CALLS = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("look", "go")]
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}]
TWO = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
"""Shows one call a turn, as gpt-oss's does."""
PARTS = "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %};{% endfor %}"
"""Reads contents as lists of parts, as Idefics3's does."""


@pytest.mark.parametrize(
    ("template", "messages", "fault"),
    [
        (TWO, CALLED, "leaves out further calls of the role 'assistant' behind the first message. Set"),
        (TWO.replace("[0]", "[1]"), CALLED, "leaves out the first call of the role 'assistant'"),
        (PARTS, [USER], "leaves out what has the role 'user'. Set"),
        (KNOWN.replace("'assistant'", "'model'"), [USER, ASSISTANT, USER], "leaves out what has the role 'assistant' behind"),
    ],
)
def test_calls_and_texts_that_the_template_passes_over_are_refused(load, template, messages, fault) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=fault):
        load(template).render_chat(messages)


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


SPEAKS, CALLS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ tools }}{% endfor %}",
)
NAMED = {"default": SPEAKS, "tool_use": CALLS, "rag": "{{ messages[0].content }}{{ mood }}"}
FORMS = {
    "a text": lambda directory: set_option(directory, CALLS),
    "a mapping": lambda directory: set_option(directory, NAMED),
    "a list": lambda directory: set_option(directory, [{"name": n, "template": t} for n, t in NAMED.items()]),
    "a file": lambda directory: write_templates(directory, {"default": CALLS}, {}),
    "a folder": lambda directory: write_templates(directory, NAMED, {}),
    "a processor's": lambda directory: (directory / "chat_template.json").write_text(json.dumps({"chat_template": CALLS})),
    "a processor's list": lambda directory: (directory / "processor_config.json").write_text(
        json.dumps({"chat_template": [{"name": n, "template": t} for n, t in NAMED.items()]})
    ),
}


def set_option(directory: Path, template: object) -> None:
    """Write a chat template into a tokenizer's settings; None takes it out."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A tokenizer without a chat template."""
    make_tokenizer(tmp_path)
    set_option(tmp_path, None)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_templates_of_all_forms_are_read_as_transformers_reads_them(bare: Path, form: str) -> None:
    FORMS[form](bare)
    tokenizer = load_tokenizer(ModelConfig(path=str(bare)))
    assert tokenizer.render_chat([USER], [TOOL]) == f"hi{[TOOL]}"
    assert tokenizer.chat_template == CALLS
    is_named = named_templates(tokenizer.backend.chat_template) == NAMED
    assert tokenizer.render_chat([USER]) == ("hi" if is_named else "hiNone")
    assert is_named or named_templates(tokenizer.backend.chat_template) == {"default": CALLS}
    if "processor" not in form:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(bare)
        assert backend.apply_chat_template([USER], tools=[TOOL], tokenize=False) == tokenizer.render_chat([USER], [TOOL])


def test_a_recipe_names_one_of_several_templates_or_brings_its_own(bare: Path) -> None:
    set_option(bare, NAMED)
    one = load_tokenizer(ModelConfig(path=str(bare), chat_template="rag", chat_template_kwargs={"mood": "!"}))
    assert one.render_chat([USER]) == "hi!"
    assert (
        load_tokenizer(ModelConfig(path=str(bare), chat_template="<{{ messages[0].content }}>")).render_chat([USER]) == "<hi>"
    )
    every = load_tokenizer(ModelConfig(path=str(bare), chat_template_kwargs={"mood": "!"}))
    assert every.with_variables({"mood": "?"}).render_chat([USER]) == "hi"
    with pytest.raises(ConfigError, match="never reads it"):
        load_tokenizer(ModelConfig(path=str(bare), chat_template="default", chat_template_kwargs={"mood": "!"}))


@pytest.mark.parametrize("own", ["raag", "templates/rag.jinja"])
def test_a_misspelt_name_is_no_template(bare: Path, own: str) -> None:
    set_option(bare, NAMED)
    with pytest.raises(ConfigError, match=f"{own}.*'rag'"):
        load_tokenizer(ModelConfig(path=str(bare), chat_template=own))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"chat_templates": CALLS}, "chat_template.json has 'chat_templates'; expected 'chat_template' alone"),
        ({"chat_template": CALLS, "mood": "calm"}, "has 'chat_template', 'mood'"),
        ({}, "has nothing"),
        ({"chat_template": 3}, "found int as the chat template 'default'"),
        ({"chat_template": {"default": None}}, "found NoneType as the chat template 'default'"),
        ({"chat_template": [CALLS]}, "expected an object with name and template alone"),
        ({"chat_template": [{"name": "default", "template": CALLS, "mood": "calm"}]}, "name and template alone"),
        ({"chat_template": [{"nme": "default", "template": CALLS}]}, "name and template alone"),
    ],
)
def test_a_file_of_templates_holds_nothing_else(bare: Path, content: object, fault: str) -> None:
    (bare / "chat_template.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=fault):
        load_tokenizer(ModelConfig(path=str(bare)))


@pytest.mark.parametrize(
    ("listed", "fault"),
    [
        ([{"name": "default", "template": CALLS, "mood": "calm"}], "name and template alone"),
        (
            [{"name": "default", "template": CALLS}, {"name": "default", "template": SPEAKS}],
            "several chat templates of one name",
        ),
    ],
)
def test_what_transformers_passes_over_in_a_list_of_templates_is_refused(bare: Path, listed: object, fault: str) -> None:
    set_option(bare, listed)
    with pytest.raises(ModelError, match=fault):
        load_tokenizer(ModelConfig(path=str(bare)))


IN_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m['thinking'] }}{% endif %}{% endfor %}"
)
BESIDE_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ m.reasoning }}{{ c.function.name }}{% endfor %}"
    "{% endfor %}"
)


def test_a_name_of_thoughts_that_a_template_mentions_and_does_not_show_is_none(load) -> None:  # type: ignore[no-untyped-def]
    thoughtful = [USER, ASSISTANT | {"thinking": "hm"}, USER]
    with pytest.raises(DataError, match="thinking, a thought"):
        load(IN_PARTS).render_chat(thoughtful)
    assert "hm" not in load(BESIDE_CALLS).render_chat(thoughtful)
    called = [USER, ASSISTANT | {"thinking": "hm", "tool_calls": [{"function": {"name": "look"}}]}, USER]
    assert "hmlook" in load(BESIDE_CALLS).render_chat(called)


def test_templates_without_a_default_are_named_where_none_is_chosen(bare: Path) -> None:
    set_option(bare, {"rag": SPEAKS})
    with pytest.raises(DataError, match="only rag.*model.chat_template"):
        load_tokenizer(ModelConfig(path=str(bare))).render_chat([USER])


def test_templates_that_are_written_are_all_that_is_read(bare: Path) -> None:
    (bare / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    write_templates(bare, NAMED | {"../far/away": "far"}, {"mood": "calm"})
    assert sorted(path.name for path in (bare / "additional_chat_templates").iterdir()) == [
        "away.jinja",
        "rag.jinja",
        "tool_use.jinja",
    ]
    found = load_tokenizer(ModelConfig(path=str(bare), chat_template="rag"))
    assert found.render_chat([USER]) == "hicalm"
    write_templates(bare, {"default": CALLS}, {})
    assert named_templates(load_tokenizer(ModelConfig(path=str(bare))).backend.chat_template) == {"default": CALLS}
    assert not (bare / "chat_template.json").exists()
    write_templates(bare, {}, {})
    assert load_tokenizer(ModelConfig(path=str(bare))).chat_template == CALLS


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


@pytest.mark.wide(sample=6)
@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s * 2 %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 9999999 }}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [messages] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = messages | length + 8 %}{{ n ** (n ** n) }}",
        "{{ 'a'.center(200000000) }}",
    ],
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_takes_all_memory_is_ended(  # type: ignore[no-untyped-def]
    load, template: str, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_BYTES", 2**27)
    tokenizer = load("{% for m in messages %}{{ m.content }}{% endfor %}" + template)
    with ThreadPoolExecutor(1) as pool, pytest.raises(DataError, match=r"template .*(memory|at most)"):
        pool.submit(tokenizer.render_chat, [USER]).result() if in_thread else tokenizer.render_chat([USER])


def test_a_template_may_multiply(load) -> None:  # type: ignore[no-untyped-def]
    assert load("{{ '-' * 3 ~ 2 ** 10 ~ 2 * 3 ~ 1.5 * 2 ~ 2 ** -1 }}{{ messages[0].content }}").render_chat([USER]) == (
        "---102463.00.5hi"
    )
