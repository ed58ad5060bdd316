"""Tokenizers and renderers that are each wrong in one known way, made from those of rlcore-text."""

import numpy as np
from attrs import evolve
from mutants import killed_by

from rlcore.spi import SPI_VERSION, TextProvider
from rlcore_text import loading
from rlcore_text import renderer as rendering


class Tokenizer:
    """A right one."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Loads:
    """A backend that loads right tokenizers."""

    Tokens = Tokenizer

    def load_tokenizer(self, model):
        return self.Tokens(loading.load_tokenizer(model))

    def is_here(self, model):
        return loading.is_here(model)


class Renders:
    """A right renderer."""

    def __getattr__(self, name):
        return getattr(rendering, name)


TOKENIZERS = TextProvider(name="mutant", spi=SPI_VERSION, backend=f"{__name__}:Loads")
RENDERER = TextProvider(name="mutant", spi=SPI_VERSION, backend=f"{__name__}:Renders")


@killed_by("test_a_model_without_a_tokenizer")
class FindsNoDirectory(Loads):
    def is_here(self, model):
        return False


@killed_by("test_texts_come_back")
class AddsAnEnd(Loads):
    class Tokens(Tokenizer):
        def encode(self, text):
            return [*self.inner.encode(text), *self.inner.stop_token_ids[:1]]


@killed_by("test_batches_are_the_single_calls")
class PadsBatches(Loads):
    class Tokens(Tokenizer):
        def encode_batch(self, texts):
            encoded = self.inner.encode_batch(texts)
            return [[*one, *[0] * (max(map(len, encoded)) - len(one))] for one in encoded]


@killed_by("test_texts_stand_behind_others")
class AddsASpace(Loads):
    class Tokens(Tokenizer):
        def encode_behind(self, texts):
            return self.inner.encode_behind([f" {text}" for text in texts])


@killed_by("test_stop_tokens_have_no_text")
class ShowsItsEnd(Loads):
    class Tokens(Tokenizer):
        def decode(self, tokens):
            return self.inner.show(tokens)


@killed_by("test_tokens_are_of_the_vocabulary")
class CountsTooFew(Loads):
    class Tokens(Tokenizer):
        @property
        def vocabulary(self):
            return {"a": 0}


@killed_by("test_chats_end_where_the_answer_begins")
class RendersTheQuestionAlone(Loads):
    class Tokens(Tokenizer):
        def render_chat(self, messages, tools=()):
            return self.inner.render_answered(messages, tools)


@killed_by("test_chat_templates_are_saved")
class SavesNoTemplate(Loads):
    class Tokens(Tokenizer):
        def save_chat_templates(self, directory, variables):
            (directory / "chat_template.jinja").write_text("{{ messages }}")


@killed_by("test_prompts_are_their_rows")
class ReversesRows(Renders):
    def render_prompts(self, rows, *arguments, **named):
        return rendering.render_prompts(rows[::-1], *arguments, **named)


@killed_by("test_long_prompts_are_dropped_or_refused")
class NumbersRowsAnew(Renders):
    def render_prompts(self, *arguments, **named):
        found = rendering.render_prompts(*arguments, **named)
        return evolve(found, rows=np.arange(len(found.rows)))


@killed_by("test_answers_are_learned")
class LearnsPromptsToo(Renders):
    def render_examples(self, *arguments, **named):
        found = rendering.render_examples(*arguments, **named)
        return evolve(found, learned=np.ones_like(found.learned))


@killed_by("test_rows_without_a_field_are_refused")
class TakesNoRows(Renders):
    def given_rows(self, rows, config, key, **form):
        return rows


@killed_by("test_what_is_a_prompt")
class TakesAnyPrompt(Renders):
    def prompt_fault(self, value):
        return None


@killed_by("test_conversations_go_on")
class ForgetsNoEpisode(Renders):
    def conversations(self, *arguments, **named):
        made = rendering.conversations(*arguments, **named)
        made.end = lambda episode: None
        return made


@killed_by("test_parsers_are_named")
class TakesAnyName(Renders):
    def tool_parser(self, name, chat_template, engine=None):
        return None if name not in rendering.tool_forms() else rendering.tool_parser(name, chat_template, engine)
