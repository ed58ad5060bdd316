"""The model behind the server: requests become prompts of tokens, samples become answers, and sessions record both."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import evolve, field, frozen

from rlcore.spi import ChatTokenizer, DataError, FinishReason, Message, ParseToolCalls, SamplingParams, ToolCall
from rlcore.spi.arrays import Int32Array
from rlcore.thoughts import MARK_TOKENS, opened_thought
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.interface import Sample, Sampler, SampleRequest
from rlcore_serve.sessions.live_text import LiveText, split_thought
from rlcore_serve.sessions.live_tokens import LiveTokens
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_serve.sessions.record import Answer, conversation_keys
from rlcore_serve.sessions.requests import AnswerRequest
from rlcore_serve.sessions.response_formats import require_no_thought, require_schema
from rlcore_serve.sessions.session import Session
from rlcore_text.chats.conversation import Conversation, RewritingTemplateError
from rlcore_text.chats.long_texts import shortened
from rlcore_text.chats.message_order import order_fault
from rlcore_text.chats.messages import THOUGHTS, read_message
from rlcore_text.chats.plain_tools import as_text, with_tools
from rlcore_text.chats.tool_calls import FORMS, call_opening

History = Literal["segment", "refuse"]
REASONING = ("reasoning_content", "reasoning")
"""Fields of a message that have its thought: that of DeepSeek's API and that of vLLM and OpenRouter."""


@frozen(kw_only=True, eq=False)
class Choice:
    """One answer, as its client sees it."""

    sample: Sample
    content: str
    """The sample's text, up to where a stop string begins; in a chat without tool calls and the thought before it."""
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    """The thought that an answer of a chat begins with, without its marks."""
    begins_in_thought: bool = False
    """True where the prompt of a completion ends in the mark that begins a thought."""
    top_logprobs: Sequence[Mapping[int, float]] = ()
    """The most probable tokens' log-probabilities at each token, where the request asks for them."""


@frozen(kw_only=True, eq=False)
class Answered:
    """The result of a request."""

    prompt: Int32Array
    """int32 [length]"""
    choices: Sequence[Choice]
    prompt_logprobs: Sequence[Mapping[int, float]] | None = None
    """Log-probabilities of the prompt's tokens from the second on, where the request asks for them."""


@frozen(kw_only=True, eq=False)
class _Prompt:
    """The model's next input, and the answer that it follows."""

    parent: Answer | None
    read: Int32Array
    conversation: Conversation | None = None
    text: str | None = None
    begun: str = ""
    """The beginning of the answer that the request forces: the end of `read`, which the policy does not sample."""

    def tokens(self) -> Int32Array:
        return self.read if self.parent is None else np.concatenate([self.parent.context(), self.read])


@frozen(kw_only=True, eq=False)
class Prepared:
    """A request and the sample requests that it becomes."""

    request: AnswerRequest
    prompt: _Prompt
    tokens: Int32Array
    """int32 [length]: the whole prompt."""
    wanted: Sequence[SampleRequest]
    mark: str
    """The mark of a thought that the prompt ends in; "" where it ends otherwise."""


@frozen(kw_only=True, eq=False)
class ServedModel:
    """A generator, its tokenizer, and how they answer."""

    name: str
    tokenizer: ChatTokenizer
    sampler: Sampler
    max_sequence_length: int
    """Most tokens of a prompt and its answer."""
    sampling: SamplingParams
    """The default of requests; its stop tokens are those of all."""
    capabilities: frozenset[str] = frozenset()
    """The generator's capabilities."""
    vocab_size: int | None = None
    """Tokens that the model has; None where that is not known."""
    history: History = "segment"
    """Handling of a chat whose template rewrites earlier messages: a new segment of tokens rendered anew, or a refusal."""
    parse: ParseToolCalls | None = None
    """Reads the calls of tools; None where their form is not known, and tools are refused."""
    tool_form: str = ""
    """The name of the form that `parse` reads."""
    shows_tools: bool = True
    """False where the chat template reads no tools, so that the conversation's text describes them."""
    keeps_kept: bool = False
    """See SessionContext."""
    engine_logs: Path | None = None
    """Folder in which engines write their logs and metrics; None where `GET /metrics` shows none."""

    note: Callable[[str], None] = lambda text: None  # noqa: ARG005
    """Logs a note on a key that has no effect. Called from any thread."""
    _noted: set[str] = field(factory=set, init=False)
    """Keys whose note is logged already."""

    def prepare(self, session: Session, request: AnswerRequest) -> Prepared:
        """Turn a request into sample requests for the generator. RequestError where it cannot be done. Call it in a
        thread, since encoding long texts is slow."""
        for name in sorted(request.notes.keys() - self._noted):
            self._noted.add(name)
            self.note(f"a request's {request.notes[name]}")
        if request.tools and not self.shows_tools and "tools" not in self._noted:
            self._noted.add("tools")
            self.note("a request's tools are described in its first message, since the chat template reads none")
        sampling = self._sampling(session, request)
        if request.tools and self.parse is None:
            expected = f"none, as the chat template asks for calls in none of the forms {', '.join(FORMS)}"
            raise RequestError(400, f"tools: found some; expected {expected}. rollout.tool_parser names another")
        prompt = self._chat_prompt(session, request) if request.prompt is None else self._text_prompt(session, request.prompt)
        mark = opened_thought(self.tokenizer.show(prompt.tokens()[-MARK_TOKENS:].tolist()))
        require_no_thought(sampling, mark)
        if request.forced is not None:
            prompt = self._forced(
                prompt, request.forced or (request.tools[0]["function"]["name"] if len(request.tools) == 1 else ""), mark
            )
        tokens = prompt.tokens()
        limit, goes_on = self._max_tokens(session, request, len(tokens)), session.num_samples > 0
        wanted = [
            SampleRequest(
                prompt=tokens,
                seed=session.next_seed(request.seed, number),
                max_tokens=limit,
                sampling=sampling,
                conversation=-1 if session.record is None else session.number,
                goes_on=goes_on,
            )
            for number in range(request.n)
        ]
        return Prepared(request=request, prompt=prompt, tokens=tokens, wanted=wanted, mark=mark)

    def count_tokens(self, session: Session, request: AnswerRequest) -> int:
        """Count the tokens of a chat's prompt. RequestError where it cannot be read."""
        return len(self._chat_prompt(session, request).tokens())

    async def sample(self, session: Session, prepared: Prepared, live: LiveTokens | None = None) -> list[Sample]:
        """Return `n` samples, whose tokens `live` gets as they come. RequestError where there are none."""
        request, wanted = prepared.request, prepared.wanted
        if live is not None:
            wanted = live.read_by(wanted, request.top_logprobs if request.logprobs else None, request.prompt_logprobs)
        found = await asyncio.gather(*(self.sampler.sample(one) for one in wanted))
        samples = [sample for sample in found if sample is not None]
        if len(samples) < len(found):
            session.require_open()
            raise RequestError(503, "generation has ended")
        return samples

    async def answer(self, session: Session, prepared: Prepared) -> Answered:
        """Return `n` answers, and record them in the session if the request wants it. RequestError where there is none."""
        request = prepared.request
        live = LiveTokens(request.n) if request.top_logprobs or request.prompt_logprobs is not None else None
        answered = await self.settle(session, prepared, await self.sample(session, prepared, live), live)
        return evolve(answered, prompt_logprobs=None if live is None else live.prompt)

    async def settle(
        self, session: Session, prepared: Prepared, samples: Sequence[Sample], live: LiveTokens | None = None
    ) -> Answered:
        """Return the answers that samples are, and record them in the session if the request wants it."""
        session.num_answered += len(samples)
        tops = None if live is None or not prepared.request.top_logprobs else live.logprobs
        return await off_loop(self._answered, session, prepared, samples, tops or [()] * len(samples))

    def live_texts(self, prepared: Prepared) -> list[LiveText]:
        """Return the texts of a request's answers, before their first tokens."""
        request = prepared.request
        return [
            LiveText(
                decode=self.tokenizer.decode,
                show=self.tokenizer.show,
                is_chat=request.prompt is None,
                is_thinking=bool(prepared.mark),
                has_tools=bool(request.tools),
                waits=request.forced is not None,
                stops=request.sampling.stop_strings,
            )
            for _ in prepared.wanted
        ]

    def _answered(
        self, session: Session, prepared: Prepared, samples: Sequence[Sample], tops: Sequence[Sequence[Mapping[int, float]]]
    ) -> Answered:
        session.require_open()
        choices = [
            evolve(self._choice(sample, prepared), top_logprobs=top[: len(sample.tokens)])
            for sample, top in zip(samples, tops, strict=True)
        ]
        self._record(session, prepared.prompt, prepared.request, choices)
        return Answered(prompt=prepared.tokens, choices=choices)

    def _sampling(self, session: Session, request: AnswerRequest) -> SamplingParams:
        sampling = request.sampling
        if session.sampling is not None and request.chooses_distribution:
            found, expected = _distribution(sampling), _distribution(session.sampling)
            raise RequestError(400, f"found {found}; expected {expected}, which the recipe sets: leave them out")
        refused = [name for name in request.needs() if name not in self.capabilities]
        if refused:
            raise RequestError(400, f"found a request that needs {', '.join(refused)}, which the generator cannot do")
        if sampling.json_schema is not None:
            is_trained = session.record is not None and request.record
            require_schema(sampling, self.tokenizer, has_masks=self.keeps_kept or not is_trained)
        return sampling

    def _max_tokens(self, session: Session, request: AnswerRequest, num_prompt_tokens: int) -> int:
        room = self.max_sequence_length - num_prompt_tokens
        if room < 1:
            raise self._too_long(f"{num_prompt_tokens} tokens")
        return min(limit for limit in (room, request.max_tokens, session.max_tokens) if limit is not None)

    def _too_long(self, found: str) -> RequestError:
        expected = f"fewer than {self.max_sequence_length}, the most that prompt and answer have together"
        return RequestError(400, f"found a prompt of {found}; expected {expected}", code="context_length_exceeded")

    def _encoded(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """Encode a text. RequestError where its beginning alone has more tokens than the model reads."""
        if len(shortened(text, self.max_sequence_length, encode)) < len(text):
            raise self._too_long(f"more than {self.max_sequence_length} tokens")
        return encode(text)

    def _behind_text(self, text: str) -> list[int]:
        (tokens,) = self.tokenizer.encode_behind([text])
        return tokens

    def _text_prompt(self, session: Session, prompt: str | Int32Array) -> _Prompt:
        """The longest answer that the prompt continues keeps its tokens; what is behind it is encoded alone."""
        record = session.record
        if not isinstance(prompt, str):
            if self.vocab_size is not None and prompt.max() >= self.vocab_size:
                expected = f"tokens below {self.vocab_size}, the model's vocabulary"
                raise RequestError(400, f"prompt: found the token {prompt.max()}; expected {expected}")
            parent = None if record is None else record.continued_tokens(prompt)
            read = prompt[0 if parent is None else parent.length :]
            return self._readable(_Prompt(parent=parent, read=read))
        parent = None if record is None else record.continued_text(prompt)
        if parent is None or self._silent_end(parent) is not None:  # a text has no stop token in its middle
            parent = None
            encoded = [*self.tokenizer.prompt_prefix, *self._encoded(self.tokenizer.encode, prompt)]
        else:
            encoded = self._encoded(self._behind_text, prompt[len(parent.whole_text) :])
        return self._readable(_Prompt(parent=parent, read=np.asarray(encoded, np.int32), text=prompt))

    def _readable(self, prompt: _Prompt) -> _Prompt:
        if prompt.parent is None and not len(prompt.read):
            raise RequestError(400, "prompt: found no tokens; expected at least one")
        return prompt

    def _chat_prompt(self, session: Session, request: AnswerRequest) -> _Prompt:
        """The longest known conversation keeps its tokens; what the template puts behind it is encoded alone."""
        keys = conversation_keys(_without_reasoning(request.messages), request.tools, request.template_variables)
        known, parent = (0, None) if session.record is None else session.record.longest_known(keys)
        if fault := order_fault(request.messages, num_known=known, allows_repeats=session.record is None):
            raise RequestError(400, f"messages: found {fault}")
        try:
            tokenizer = self.tokenizer.with_variables(request.template_variables)
            if parent is None:
                return self._anew(request, tokenizer)
            after = request.messages[known:]
            if not after:
                raise RequestError(400, "messages: found an answer of this session at the end; expected a message behind it")
            assert parent.conversation is not None, "a chat's keys are those of chats"
            conversation, behind = parent.conversation.with_text(parent.sample.text).answered(
                after if self.shows_tools or not request.tools else as_text(after), tokenizer
            )
        except RewritingTemplateError as error:
            if self.history == "segment":
                return self._anew(request, tokenizer)
            raise RequestError(
                400,
                f"{error}. Set model.chat_template to one that leaves earlier messages as they were, or let "
                'such conversations begin anew: rollout.history = "segment"',
            ) from error
        except DataError as error:
            raise RequestError(400, str(error)) from error
        return _Prompt(parent=parent, read=self._behind(parent, behind), conversation=conversation)

    def _anew(self, request: AnswerRequest, tokenizer: ChatTokenizer) -> _Prompt:
        try:
            if request.tools and not self.shows_tools:
                conversation = Conversation.begin(with_tools(request.messages, request.tools), tokenizer)
            else:
                conversation = Conversation.begin(request.messages, tokenizer, request.tools)
        except DataError as error:
            raise RequestError(400, str(error)) from error
        read = np.asarray(self._encoded(self.tokenizer.encode, conversation.opened), np.int32)
        return self._readable(_Prompt(parent=None, read=read, conversation=conversation))

    def _forced(self, prompt: _Prompt, name: str, mark: str) -> _Prompt:
        """Return the prompt with the beginning of a call behind it, of the tool of this name if it has one. RequestError
        where the form of calls allows none."""
        opening = call_opening(self.tool_form, name)
        if opening is None or (mark and not mark.startswith("<")):
            expected = f'"auto" or "none": a call in the form {self.tool_form} cannot be begun in the place of the model'
            raise RequestError(400, f"tool_choice: found one that forces a call; expected {expected}")
        begun = f"\n</{mark[1:].strip()}\n\n{opening}" if mark else opening
        read = np.concatenate([prompt.read, np.asarray(self._encoded(self._behind_text, begun), np.int32)])
        conversation = None if prompt.conversation is None else prompt.conversation.with_text(begun)
        return evolve(prompt, read=read, conversation=conversation, begun=begun)

    def _behind(self, parent: Answer, behind: str) -> Int32Array:
        """int32 [length]: a text behind an answer. The stop token that the model has said already is not repeated; one that it
        has not said, since its answer was cut, is none of its own."""
        tokens = self._encoded(self._behind_text, behind)
        return np.asarray(tokens[1:] if tokens[:1] == [self._silent_end(parent)] else tokens, np.int32)

    def _silent_end(self, answer: Answer) -> int | None:
        """The stop token that an answer ends with and that its text does not show; None where it ends otherwise."""
        last = answer.sample.tokens[-1:].tolist()
        return last[0] if last and last[0] in self.tokenizer.stop_token_ids and not self.tokenizer.decode(last) else None

    def _choice(self, sample: Sample, prepared: Prepared) -> Choice:
        """An answer with a call that cannot be read is text as a whole, for its client to judge."""
        request, mark, begun = prepared.request, prepared.mark, prepared.prompt.begun
        text, calls = f"{begun}{_stopped(sample.text, sample, request)}", tuple[ToolCall, ...]()
        if request.prompt is not None:
            return Choice(sample=sample, content=text, begins_in_thought=bool(mark))
        if request.tools and self.parse is not None:
            tokens = sample.tokens.tolist()
            ended = bool(tokens) and tokens[-1] in self.tokenizer.stop_token_ids
            shown = self.tokenizer.show(tokens[:-1] if ended else tokens)  # some forms have special tokens in them
            content, found = self.parse(f"{mark}{begun}{_stopped(shown, sample, request)}", request.tools)
            if found and all(call.error is None for call in found):
                text, calls = content.removeprefix(mark), tuple(found)
        parts = split_thought(text, is_thinking=bool(mark))
        content = parts.content.lstrip() if request.tools else parts.content
        return Choice(sample=sample, content=content, tool_calls=calls, reasoning=parts.reasoning)

    def _record(self, session: Session, prompt: _Prompt, request: AnswerRequest, choices: Sequence[Choice]) -> None:
        if session.record is None or not request.record:
            return
        for choice in choices:
            answer = Answer(
                parent=prompt.parent,
                read=prompt.read,
                sample=choice.sample,
                conversation=prompt.conversation,
                prompt=prompt.text,
            )
            key = None
            if prompt.conversation is not None:
                said = _without_reasoning((*request.messages, read_message(assistant_message(choice))))
                key = conversation_keys(said, request.tools, request.template_variables)[-1]
            session.record.add(answer, key)


def assistant_message(choice: Choice, call_ids: Sequence[str] = ()) -> dict[str, Any]:
    """Return OpenAI's message of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message |= dict.fromkeys(REASONING, choice.reasoning)
    if choice.tool_calls:
        ids = call_ids or [""] * len(choice.tool_calls)
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
            for call_id, call in zip(ids, choice.tool_calls, strict=True)
        ]
    return message


def _without_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without thoughts: a client may send an answer back with its thought or without."""
    return [{name: value for name, value in message.items() if name not in THOUGHTS} for message in messages]


def _stopped(text: str, sample: Sample, request: AnswerRequest) -> str:
    """A text of a sample up to the stop string that ended it."""
    if sample.finish_reason is not FinishReason.STOP:
        return text
    found = [text.index(stop) for stop in request.sampling.stop_strings if stop in text]
    return text[: min(found, default=len(text))]


def _distribution(sampling: SamplingParams) -> str:
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
