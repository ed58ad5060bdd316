"""Chat over several turns: what the policy reads is what the model's own template makes of the whole conversation."""

import numpy as np
import pytest
from attrs import define, field

from rlcore.config.model import ModelConfig
from rlcore.run.data.tokenizer import load_tokenizer
from rlcore.run.protocols import Responses
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import RolloutCollector
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode_starts import PromptLimit
from rlcore.spi import (
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
from rlcore.testing.models import make_tokenizer

from .chat_templates import LLAMA_3, QWEN2_5, QWEN3, set_chat_template  # type: ignore[import-not-found]

FAMILIES = {"qwen2.5": (QWEN2_5, "<|im_end|>"), "llama3": (LLAMA_3, "<|eot_id|>"), "qwen3": (QWEN3, "<|im_end|>")}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2+2?"}


def says(role, content):
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The tokenizer of a family; the directories are made once."""
    directories = {}
    for family, (template, end) in FAMILIES.items():
        directories[family] = tmp_path_factory.mktemp("family")
        make_tokenizer(directories[family])
        set_chat_template(directories[family], template, end)
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
        self.prompts.append(request.prompts.sequence(0).tolist())
        text, end = self.turns[len(self.prompts) - 1]
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


@define
class Dialogue:
    """Says what it is told, turn by turn; then the episode is done."""

    opening: Observation
    answers: list

    async def reset(self, row, seed):
        return ResetResult(observation=self.opening, state=0)

    async def step(self, state, turn):
        if state == len(self.answers):
            return StepResult(reward=1.0, done=True)
        return StepResult(reward=0.0, done=False, observation=self.answers[state], state=state + 1)


@pytest.fixture
def talk():
    """Runs two samples of one episode; returns the generator and what was collected."""
    runners = []

    def run(tokenizer, turns, opening, answers, on_error="error", max_turns=8):
        runners.append(EpisodeRunner(Dialogue(opening, answers), 10.0, on_error))
        script = Script(tokenizer, turns)
        progress = Progress()
        collector = RolloutCollector(
            generator=script,
            episodes=runners[-1],
            tokenizer=tokenizer,
            sampling=SamplingParams(temperature=1.0, stop_token_ids=tokenizer.stop_token_ids),
            samples_per_prompt=2,
            prompt_limit=PromptLimit(max_tokens=500, drops=False, key="data.train"),
            max_response_tokens=2000,
            max_turns=max_turns,
            max_failed_fraction=0.5,
            clock=PhaseClock(progress),
            progress=progress,
        )
        return script, collector.collect([{}], 0, [0])

    yield run
    for runner in runners:
        runner.close()


def reference(tokenizer, messages):
    """What transformers makes of the whole conversation."""
    return tokenizer.backend.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **tokenizer.model.chat_template_kwargs
    )["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("opening", [[USER], [SYSTEM, USER]], ids=["user", "system"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_every_prompt_is_the_templates_own_of_the_whole_conversation(load, talk, family, opening, role):
    tokenizer, end = load(family), FAMILIES[family][1]
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
    assert tokenizer.backend.decode(tokens).count("<|begin_of_text|>") == (family == "llama3")
    assert tokenizer.backend.decode(tokens).count("system") == (len(opening) - 1 or family == "qwen2.5")


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
    assert "Set model.chat_template to one that leaves earlier turns as they were" in message


def test_a_template_that_changes_what_stood_before_the_turn_is_refused(load, talk):
    """Without thinking, Qwen3's template begins each turn with an empty thought, which it leaves out of earlier ones."""
    tokenizer = load("qwen3", chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.render_chat([USER]).endswith("<think>\n\n</think>\n\n")
    turns = [("4", "<|im_end|>"), ("4", "<|im_end|>")]
    with pytest.raises(DataError, match="rewrites what it had shown before the policy's turn"):
        talk(tokenizer, turns, Observation(messages=[USER]), [Observation(messages=[USER])])


def test_what_cannot_be_told_is_masked_and_counted_where_the_recipe_masks(load, talk):
    with pytest.raises(
        RewardError, match=r"failed on 2 of 2 samples of the step: 2 x the chat template rewrites what the policy said"
    ):
        talk(load("qwen3"), THOUGHT, Observation(messages=[USER]), [Observation(messages=[USER])], on_error="mask")


def test_one_turn_asks_nothing_of_the_template(load, talk):
    talk(load("qwen3"), THOUGHT, Observation(messages=[USER]), [Observation(messages=[USER])], max_turns=1)


def test_messages_after_a_prompt_of_text_are_refused(load, talk):
    with pytest.raises(ContractError, match="in an episode whose prompt was text or tokens"):
        talk(load("qwen2.5"), [("4", "")], Observation(text="2+2="), [Observation(messages=[USER])])


def test_a_variable_that_the_template_never_reads_is_refused(load):
    with pytest.raises(ConfigError) as raised:
        load("qwen2.5", chat_template_kwargs={"enable_thinking": False})
    (problem,) = raised.value.problems
    assert problem.path == "model.chat_template_kwargs.enable_thinking"
    assert problem.found == "a chat template that never reads it"
