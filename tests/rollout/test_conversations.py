"""Chat over several turns: what the policy reads is what the model's own template makes of the whole conversation."""

from itertools import pairwise

import numpy as np
import pytest
from attrs import define, field

from rlcore.config.model import ModelConfig
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.metrics import rollout_metrics
from rlcore.spi import (
    EPISODE_IDS,
    GROUP_IDS,
    ConfigError,
    ContractError,
    DataError,
    FinishReason,
    GenerateResult,
    Observation,
    ResetResult,
    RewardError,
    SamplingParams,
    StepResult,
)
from rlcore.spi.execution import Responses
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode import Episode
from rlcore_rollout.sampler import EpisodeSampler
from rlcore_rollout.step_plans import PromptLimit
from rlcore_text.chats.conversation import Conversation, opened_prompt
from rlcore_text.chats.tool_calls import ToolParser
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer

from ..text.chats.chat_templates import FAMILIES, set_chat_template  # type: ignore[import-not-found]
from .answering import answer_stream  # type: ignore[import-not-found]

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2+2?"}


def says(role, content):
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The tokenizer of a family; the directories are made once."""
    directories = {}
    for name, family in FAMILIES.items():
        directories[name] = tmp_path_factory.mktemp("family")
        make_tokenizer(directories[name])
        set_chat_template(directories[name], family.template, family.end)
    return lambda family, **options: load_tokenizer(ModelConfig(path=str(directories[family]), **options))


@define
class Script:
    """A generator that says what it is told, turn by turn: text, and the token that ends it."""

    tokenizer: object
    turns: list
    prompts: list = field(factory=list)
    """What it was asked to go on from: of each turn, the tokens of its first sample."""

    def has(self, capability):
        return False

    def generate(self, request):
        prompt = request.prompts.sequence(0).tolist()
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        text, end = self.turns[self.prompts.index(prompt)]
        one = np.asarray([*self.tokenizer.encode(text), *self.tokenizer.encode(end)], np.int32)
        number = len(request.prompts.lengths) * request.num_samples
        result = GenerateResult(
            offsets=np.arange(number + 1, dtype=np.int64) * len(one),
            tokens=np.tile(one, number),
            logprobs=np.zeros(number * len(one), np.float32),
            weight_versions=np.zeros(number * len(one), np.int32),
            finish_reasons=np.full(number, FinishReason.STOP, np.uint8),
        )
        return Responses.of(result, self.tokenizer)

    def stream(self, feed, weight_version):
        answer_stream(self.generate, feed)


@define
class Dialogue:
    """Says what it is told, turn by turn; then the episode is done."""

    opening: Observation
    answers: list
    heard: list
    """The turns."""

    async def reset(self, row, seed):
        return ResetResult(observation=self.opening, state=0)

    async def step(self, state, turn):
        self.heard.append(turn)
        if state == len(self.answers):
            return StepResult(reward=1.0, done=True)
        return StepResult(reward=0.0, done=False, observation=self.answers[state], state=state + 1)


@pytest.fixture
def talk():
    """Runs two samples of one episode; returns the generator and what was collected."""
    runners = []

    def run(tokenizer, turns, opening, answers, on_error="error", max_turns=8, history="refuse", parser="auto", heard=None):
        runners.append(EpisodeRunner(Dialogue(opening, answers, [] if heard is None else heard), 10.0, on_error))
        script = Script(tokenizer, turns)
        progress = Progress()
        sampler = EpisodeSampler(
            generator=script,
            episodes=runners[-1],
            tokenizer=tokenizer,
            sampling=SamplingParams(temperature=1.0, stop_token_ids=tokenizer.stop_token_ids),
            samples_per_prompt=2,
            prompt_limit=PromptLimit(max_tokens=500, drops=False, key="data.train"),
            max_response_tokens=2000,
            max_turns=max_turns,
            max_failed_fraction=0.5,
            history=history,
            tool_parser=None if parser is None else ToolParser.named(parser, tokenizer.chat_template),
            clock=PhaseClock(progress),
            progress=progress,
        )
        return script, sampler.collect([{}], 0, [0])

    yield run
    for runner in runners:
        runner.close()


def reference(tokenizer, messages, tools=None):
    """What transformers makes of the whole conversation."""
    return tokenizer.backend.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=True, **tokenizer.model.chat_template_kwargs
    )["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("opening", [[USER], [SYSTEM, USER]], ids=["user", "system"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_every_prompt_is_the_templates_own_of_the_whole_conversation(load, talk, family, opening, role):
    tokenizer, end, traits = load(family), FAMILIES[family].end, FAMILIES[family]
    if (SYSTEM in opening and not traits.system) or (role == "tool" and not traits.results):
        with pytest.raises(DataError, match="chat template refuses"):
            talk(tokenizer, [("4", end)] * 2, Observation(messages=opening), [Observation(messages=[says(role, "No?")])])
        return
    said, heard = ["4", "Yes: 2+2 = 4.\nSure.", "4"], [says(role, "Are you sure?"), says(role, "Once\nmore.")]
    script, collected = talk(
        tokenizer,
        [(text, end) for text in said],
        Observation(messages=opening),
        [Observation(messages=[message]) for message in heard],
    )
    conversation = list(opening)
    for number, prompt in enumerate(script.prompts):
        assert prompt == reference(tokenizer, conversation)
        conversation.append(says("assistant", said[number]))
        conversation += heard[number : number + 1]
    assert len(script.prompts) == 3
    batch = collected.batch
    tokens, mask = batch.tokens[: batch.offsets[1]], batch.loss_mask[: batch.offsets[1]]
    assert tokens[mask].tolist() == [token for text in said for token in tokenizer.encode(text + end)]
    assert tokenizer.backend.decode(tokens).count("<|begin_of_text|>") == family.startswith(("llama", "gemma"))


def test_several_messages_at_once_and_a_turn_that_a_stop_string_ended(load, talk):
    tokenizer = load("qwen2.5")
    answer = [says("user", "First."), says("user", "Second.")]
    script, _ = talk(tokenizer, [("4", ""), ("5", "")], Observation(messages=[USER]), [Observation(messages=answer)])
    assert script.prompts[1] == reference(tokenizer, [USER, says("assistant", "4"), *answer])


def test_tokens_stay_as_sampled_where_the_template_trims_white_space(load, talk):
    """What is sampled is not tokenised again, whatever the template shows of it."""
    tokenizer = load("llama3")
    script, _ = talk(
        tokenizer,
        [("  4 \n", "<|eot_id|>"), ("5", "<|eot_id|>")],
        Observation(messages=[USER]),
        [Observation(messages=[USER])],
    )
    shown = reference(tokenizer, [USER])
    whole = reference(tokenizer, [USER, says("assistant", "4"), USER])
    after_answer = whole[len(shown) + 2 :]
    assert script.prompts[1] == [*shown, *tokenizer.encode("  4 \n<|eot_id|>"), *after_answer]


def test_text_is_part_of_the_turn_that_it_stands_in(load, talk):
    """As tools answer that write into the policy's turn."""
    tokenizer = load("qwen2.5")
    result = np.asarray(tokenizer.encode("[5]"), np.int32)
    answers = [Observation(text=" -> 4. "), Observation(tokens=result), Observation(messages=[says("user", "Good.")])]
    turns = [("2+2", ""), ("And ", ""), (" done", "<|im_end|>"), ("", "<|im_end|>")]
    script, _ = talk(tokenizer, turns, Observation(messages=[USER]), answers)
    conversation = [USER, says("assistant", "2+2 -> 4. And [5] done"), says("user", "Good.")]
    assert script.prompts[3] == reference(tokenizer, conversation)


def test_thinking_is_kept_where_the_template_keeps_it(load, talk):
    tokenizer = load("qwen3")
    said = "<think>\nHm.\n</think>\n\nlook(2+2)"
    turns = [(said, "<|im_end|>"), ("4", "<|im_end|>")]
    script, _ = talk(tokenizer, turns, Observation(messages=[USER]), [Observation(messages=[says("tool", "4")])])
    assert script.prompts[1] == reference(tokenizer, [USER, says("assistant", said), says("tool", "4")])


THOUGHT = [("<think>\nHm.\n</think>\n\n4", "<|im_end|>"), ("4", "<|im_end|>")]


def test_a_template_that_strips_thinking_is_refused_with_the_reason(load, talk):
    with pytest.raises(DataError) as raised:
        talk(load("qwen3"), THOUGHT, Observation(messages=[USER]), [Observation(messages=[USER])])
    message = str(raised.value)
    assert "the chat template rewrites what the policy said: found 'im_start|>assistant\\n4<|im_end|>" in message
    assert "; expected 'im_start|>assistant\\n<think>\\nHm.\\n</think>\\n\\n4<|im_end|>" in message
    assert "rollout.history" in message


def test_a_template_that_changes_what_stood_before_the_turn_is_refused(load, talk):
    """Without thinking, Qwen3's template begins each turn with an empty thought, which it leaves out of earlier ones."""
    tokenizer = load("qwen3", chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.render_chat([USER]).endswith("<think>\n\n</think>\n\n")
    turns = [("4", "<|im_end|>"), ("4", "<|im_end|>")]
    with pytest.raises(DataError, match="rewrites what"):
        talk(tokenizer, turns, Observation(messages=[USER]), [Observation(messages=[USER])])


def test_what_cannot_be_told_is_masked_and_counted_where_the_recipe_masks(load, talk):
    with pytest.raises(RewardError, match="2 of 2 samples .*: 2 x "):
        talk(load("qwen3"), THOUGHT, Observation(messages=[USER]), [Observation(messages=[USER])], on_error="mask")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_family_makes_of_a_thought_that_a_user_answers(load, talk, family):
    tokenizer, end = load(family), FAMILIES[family].end
    arguments = ([(THOUGHT[0][0], end), ("4", end)], Observation(messages=[USER]), [Observation(messages=[USER])])
    if FAMILIES[family].keeps_thoughts:
        script, _ = talk(tokenizer, *arguments)
        assert script.prompts[1] == reference(tokenizer, [USER, says("assistant", THOUGHT[0][0]), USER])
    else:
        with pytest.raises(DataError, match="rewrites"):
            talk(tokenizer, *arguments)


@pytest.mark.parametrize("thinks", [True, False])
def test_what_was_seen_is_kept_where_the_recipe_says_so(load, talk, thinks):
    """The thought stays before its answer; behind the turn stands what the template puts behind one without a thought."""
    tokenizer = load("qwen3", chat_template_kwargs={"enable_thinking": thinks})
    script, _ = talk(tokenizer, THOUGHT, Observation(messages=[USER]), [Observation(messages=[USER])], history="keep_sampled")
    first = reference(tokenizer, [USER])
    assert script.prompts[0] == first
    plain = tokenizer.backend.decode(reference(tokenizer, [USER, says("assistant", "4"), USER]))
    added = plain.split("<|im_start|>assistant\n4<|im_end|>")[1]
    assert script.prompts[1] == [*first, *tokenizer.encode(f"{THOUGHT[0][0]}<|im_end|>{added}")]


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_shown_once_and_calls_are_no_text_to_be_written_anew(load, talk, family):
    tokenizer, traits = load(family), FAMILIES[family]
    call = {
        "hermes": '<tool_call>\n{"name":"look",  "arguments":{}}\n</tool_call>',
        "llama3_json": '{"name":"look",  "parameters":{}}',
    }
    opening = Observation(messages=[SYSTEM, USER] if traits.system else [USER], tools=[TOOL])
    if traits.form is None:
        with pytest.raises(DataError, match="never shows any"):
            talk(tokenizer, [("4", "")], opening, [])
        return
    said, heard = call[traits.form], says("tool", "4")
    turns = [(said, traits.end), (said, traits.end), ("4", traits.end)]
    script, _ = talk(tokenizer, turns, opening, [Observation(messages=[heard])] * 2)
    conversation = list(opening.messages)
    for prompt in script.prompts:
        assert prompt == reference(tokenizer, conversation, [TOOL])
        conversation += [says("assistant", said), heard]
    assert len(script.prompts) == 3


def test_calls_reach_the_environment_and_those_that_cannot_be_read_too(load, talk):
    """The environment answers a call that is none as it likes; the run goes on."""
    tokenizer, heard = load("qwen2.5"), []
    turns = [('Hm. <tool_call>{"name": "look", "arguments": {"at": 2}}</tool_call><tool_call>{oops', ""), ("4", "<|im_end|>")]
    opening = Observation(messages=[USER], tools=[TOOL])
    talk(tokenizer, turns, opening, [Observation(messages=[says("tool", "4")])], heard=heard)
    first, last = heard[0], heard[-1]
    assert [(call.name, dict(call.arguments), call.error is None) for call in first.tool_calls] == [
        ("look", {"at": 2}, True),
        ("", {}, False),
    ]
    assert (first.content, last.content, last.tool_calls) == ("Hm.", "4", ())


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ("Hm. {call}", "Hm. {call}", 0),
        ("Hm. {call}</think>No.", "Hm. {call}</think>No.", 0),
        ("Hm.</think>{call}", "Hm.</think>", 1),
        ("Hm. {call}</think>{call}", "Hm. {call}</think>", 1),
    ],
)
@pytest.mark.parametrize("begins", [True, False])
def test_a_call_in_a_thought_that_the_prompt_begins_is_none(load, talk, said, content, calls, begins):
    tokenizer, heard = load("qwen2.5"), []
    template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    tokenizer.backend.chat_template = template if begins else tokenizer.chat_template
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    opening = Observation(messages=[USER], tools=[TOOL])
    talk(tokenizer, [(said.format(call=call), "<|im_end|>")], opening, [], heard=heard)
    assert heard[0].begins_in_thought is begins
    if begins or "</think>" in said:
        assert (heard[0].content, len(heard[0].tool_calls)) == (content.format(call=call), calls)
    else:
        assert len(heard[0].tool_calls) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_goes_on_with_an_answer_that_the_prompt_begins(load, family):
    tokenizer = load(family)
    opened = tokenizer.render_chat([USER])
    begun = {"role": "assistant", "content": "Well, "}
    conversation = Conversation.begin([USER, begun], tokenizer, continues=True)
    assert opened_prompt([USER, begun], tokenizer) == (opened, "Well, ")
    gone_on, added = conversation.with_text("4").answered([USER], tokenizer)
    plain, expected = Conversation.begin([USER], tokenizer).with_text("Well, 4").answered([USER], tokenizer)
    assert (gone_on.shown, added) == (plain.shown, expected)
    assert Conversation.begin([USER, begun], tokenizer).opened == tokenizer.render_chat([USER, begun])


class Opening:
    """A tokenizer whose template opens a thought."""

    def render_chat(self, messages, tools=()):
        return f"{messages[-1]['content']}|<think>\n"


@pytest.mark.parametrize(
    ("begun", "shown"),
    [
        ("<think>", "q|<think>\n"),
        ("<think>\nSo", "q|<think>\nSo"),
        ("<think>So", "q|<think>\nSo"),
        ("<think>\n\n</think>\n\n", "q|<think>\n\n</think>\n\n"),
        ("So", "q|<think>\nSo"),
        ("", "q|<think>\n"),
    ],
)
def test_a_thought_that_the_template_opens_is_opened_once(begun, shown):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": begun}]
    assert "".join(opened_prompt(messages, Opening())) == shown


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "a"}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
        [USER, {"role": "assistant", "content": "a", "reasoning": "b"}],
        [USER, {"role": "assistant", "content": [{"type": "image", "image": b"a"}]}],
    ],
)
def test_what_is_no_beginning_of_an_answer_is_refused(messages):
    with pytest.raises(DataError, match="beginning of an answer"):
        opened_prompt(messages, Opening())


def test_tools_need_a_parser(load, talk):
    with pytest.raises(ConfigError) as raised:
        talk(load("qwen2.5"), [("4", "")], Observation(messages=[USER], tools=[TOOL]), [], parser=None)
    assert [problem.path for problem in raised.value.problems] == ["rollout.tool_parser"]


class Counting:
    """A tokenizer that counts the messages that it is given to render."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_messages = tokenizer, 0

    def render_chat(self, messages, tools=()):
        self.num_messages += len(messages)
        return self.tokenizer.render_chat(messages, tools)


@pytest.mark.wide(pairwise=True)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "tool", "tool", "user")], ids=["chat", "tools", "both"])
def test_rendering_costs_no_more_a_turn_in_long_episodes(load, family, roles):
    if "tool" in roles and not FAMILIES[family].results:
        pytest.skip("takes no messages of tools")
    tokenizer, rendered = load(family), {}
    for num_turns in (8, 128):
        counting = Counting(tokenizer)
        conversation = Conversation.begin([USER], counting)
        for number in range(num_turns):
            said = conversation.with_text(f"turn {number}")
            conversation, added = said.answered([says(roles[number % len(roles)], f"heard {number}")], counting)
            assert tokenizer.render_chat(said.messages) + said.turn + added == tokenizer.render_chat(conversation.messages)
        rendered[num_turns] = counting.num_messages
    assert rendered[128] < 16 * rendered[8] * 1.5
    assert rendered[128] < 128 * 16  # each turn anew would be 128² messages


def test_a_template_that_rewrites_what_lies_far_back_is_refused(load):
    """Beyond what is rendered at every turn: found at the next turn whose number is a power of two."""
    tokenizer = load("chatml")
    backend = tokenizer.backend
    own = backend.chat_template
    backend.chat_template = own.replace("message['content']", "(message['content'] if messages|length < 6 else '…')", 1)
    try:
        conversation = Conversation.begin([USER], tokenizer)
        with pytest.raises(DataError, match="rewrites what it"):
            for _ in range(4):
                conversation, _ = conversation.with_text("4").answered([says("user", "Sure?")], tokenizer)
        assert conversation.num_answered == 3
    finally:
        backend.chat_template = own


def test_one_turn_asks_nothing_of_the_template(load, talk):
    talk(load("qwen3"), THOUGHT, Observation(messages=[USER]), [Observation(messages=[USER])], max_turns=1)


def test_messages_after_a_prompt_of_text_are_refused(load, talk):
    with pytest.raises(ContractError, match="prompt was text"):
        talk(load("qwen2.5"), [("4", "")], Observation(text="2+2="), [Observation(messages=[USER])])


def test_a_variable_that_the_template_never_reads_is_refused(load):
    with pytest.raises(ConfigError) as raised:
        load("qwen2.5", chat_template_kwargs={"enable_thinking": False})
    (problem,) = raised.value.problems
    assert problem.path == "model.chat_template_kwargs.enable_thinking"
    assert problem.found == "a chat template that never reads it"


def test_a_template_that_strips_thinking_begins_a_segment_by_default(load, talk):
    """Each sampled token is in the loss once, behind the context that it was sampled in."""
    tokenizer, end = load("qwen3"), "<|im_end|>"
    turns = [("<think>\nHm.\n</think>\n\n4", end), ("<think>\nSo.\n</think>\n\n5", end), ("<think>\nOh.\n</think>\n\n6", end)]
    answers = [Observation(messages=[says("user", "Sure?")]), Observation(messages=[says("user", "Really?")])]
    script, collected = talk(tokenizer, turns, Observation(messages=[USER]), answers, history="segment")
    conversation = [USER, says("assistant", "4"), says("user", "Sure?"), says("assistant", "5"), says("user", "Really?")]
    assert script.prompts == [reference(tokenizer, conversation[:number]) for number in (1, 3, 5)]
    batch = collected.batch
    assert batch.sequence_columns[EPISODE_IDS].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.sequence_columns[GROUP_IDS].tolist() == [0] * 6
    for number, (start, stop) in enumerate(pairwise(batch.offsets.tolist())):
        said = tokenizer.encode(turns[number % 3][0] + end)
        assert batch.tokens[start:stop].tolist() == [*script.prompts[number % 3], *said]
        assert batch.loss_mask[start:stop].tolist() == [False] * len(script.prompts[number % 3]) + [True] * len(said)
        assert collected.turns.turn_of[start:stop].tolist() == [-1] * len(script.prompts[number % 3]) + [number % 3] * len(said)
    assert collected.responses == [text for text, _ in turns] * 2
    assert collected.num_generated.tolist() == [len(tokenizer.encode(text + end)) for text, _ in turns] * 2
    assert collected.rewards.tolist() == [1.0] * 6
    assert collected.environment_metrics == {"segments_per_episode": 3.0}
    assert rollout_metrics(collected)["response_length_mean"] == collected.num_generated[:3].sum()


def test_results_of_tools_go_on_in_the_same_segment(load, talk):
    tokenizer, thought = load("qwen3"), "<think>\nHm.\n</think>\n\n"
    turns = [(f"{thought}look(2+2)", "<|im_end|>"), (f"{thought}4", "<|im_end|>"), ("5", "<|im_end|>")]
    answers = [Observation(messages=[says("tool", "4")]), Observation(messages=[says("user", "Sure?")])]
    _, collected = talk(tokenizer, turns, Observation(messages=[USER]), answers, history="segment")
    first, second = collected.batch.sequences()[:2]
    assert collected.batch.sequence_columns[EPISODE_IDS].tolist() == [0, 0, 1, 1]
    assert tokenizer.show(first.tolist()).count("<think>\nHm.") == 2
    assert "Hm." not in tokenizer.show(second.tolist())
    assert collected.turns.offsets.tolist() == [0, 3, 6]


def test_what_a_segment_costs_is_what_it_is_longer():
    """A segment that is shorter than the one before costs nothing, so that no context exceeds prompt and budget together."""
    episode = Episode(number=0, state=None, budget=10)
    episode.read(np.arange(5, dtype=np.int32))
    episode.next_turn(np.arange(4, dtype=np.int32), begins_segment=True)
    assert (episode.budget, episode.context().tolist(), episode.length) == (10, [0, 1, 2, 3], 9)
    episode.next_turn(np.arange(11, dtype=np.int32), begins_segment=True)
    assert (episode.budget, len(episode.context()), episode.given_budget) == (3, 11, 10)
    episode.next_turn(np.arange(14, dtype=np.int32), begins_segment=True)
    assert episode.ended
    assert [len(tokens) for tokens in episode.segment_tokens()] == [5, 4, 11]
