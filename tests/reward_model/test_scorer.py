"""The scores of the reward model's process equal the model called on each sequence by itself."""

import shutil
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore_reward_model.scorer import Conversation, Failure, RewardTokenizer, Scoring, score, tokens_of
from rlcore_text.rows.preferences import render_preferences
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.models import make_model

CHAT = ({"role": "user", "content": "Say a word."},)
CONVERSATIONS = [
    Conversation(prompt="1+1=", answer="2"),
    Conversation(prompt="a longer question? ", answer="with a longer answer"),
    Conversation(prompt=CHAT, answer="word"),
    Conversation(prompt="1+1=", answer=""),
]


@pytest.fixture(scope="module")
def scoring(reward_model):
    return Scoring(path=str(reward_model), device="cpu", dtype="float32")


def alone(path, text):
    """The reward of a text with the token that ends it, by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits)


def encoded(conversation, backend, *ends):
    """Tokens by a tokenizer of transformers, whose end of sequence ends answers, as `ends` do."""
    model, stops = ModelConfig(path=str(Path(__file__).parent)), tuple(dict.fromkeys((backend.eos_token_id, *ends)))
    return tokens_of(
        conversation, RewardTokenizer(backend=backend, stop_token_ids=stops, prompt_prefix=(), model=model, vocab_size=None)
    )


def test_a_batch_has_the_rewards_that_each_text_has_alone(scoring):
    texts = ["1+1=2", "a longer question? with a longer answer", "user: Say a word.\nassistant: word", "1+1="]
    expected = [alone(scoring.path, text) for text in texts]
    assert score(scoring, CONVERSATIONS) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(expected)


TEMPLATES = {
    "one end": "{% for m in messages %}{{ m['content'] }}<|end|>\n{% endfor %}",
    "two ends": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% else %}<|end|>{% endif %}",
    "no end": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "unlisted end": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "one turn": "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "today": "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
}


def spaced_tokenizer(directory):
    """One that puts a space before each text, and merges it with the letter behind it."""
    tokens = ["<|end|>", "\u2581", *string.ascii_letters, *string.digits, *" .:+=?\n"]
    merges = [("\u2581", letter) for letter in string.ascii_letters + string.digits]
    vocabulary = {token: number for number, token in enumerate([*tokens, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    backend.add_special_tokens(["<|over|>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


@pytest.mark.parametrize("kind", ["bytes", "spaced"])
@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_what_is_scored_are_the_tokens_that_a_run_trains_on(reward_model, tmp_path, template, kind):
    path = reward_model if kind == "bytes" else spaced_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATES.get(template)
    of_run = load_tokenizer(ModelConfig(path=str(path), chat_template=tokenizer.chat_template))
    prompt, answers = ("1+1=", ("2", "3 or so")) if template is None else (list(CHAT), ("word", "another word"))
    row = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    if template is not None:
        row |= {name: [*prompt, {"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    trained = render_preferences(
        [row], of_run, DatasetConfig(source="jsonl"), key="data.train", max_prompt_tokens=100, max_response_tokens=100
    ).tokens
    expected = [part.tolist() for part in np.split(trained.tokens, trained.offsets[1:-1])]
    found = [encoded(Conversation(prompt=prompt, answer=answer), tokenizer, *of_run.stop_token_ids) for answer in answers]
    assert found == expected


def test_an_answer_ends_with_the_first_token_of_what_follows_as_a_run_trains_it(reward_model):
    template = "{% for m in messages %}{{ '?' if m['role'] == 'user' else '!' }}"
    template += "{{ m['content'] if loop.last else m['content'].split('...')[-1] }}{% endfor %}"  # an earlier thought is gone
    template += "{% if add_generation_prompt %}!{% endif %}"
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    tokenizer.chat_template, (next_user,) = template, tokenizer("?", add_special_tokens=False).input_ids
    ends = (tokenizer.eos_token_id, next_user)
    of_run = evolve(load_tokenizer(ModelConfig(path=str(reward_model), chat_template=template)), stop_token_ids=ends)
    row = {"prompt": list(CHAT)} | {
        name: [{"role": "assistant", "content": said}] for name, said in (("chosen", "a"), ("rejected", "so...b"))
    }
    trained = render_preferences(
        [row], of_run, DatasetConfig(source="jsonl"), key="data.train", max_prompt_tokens=100, max_response_tokens=100
    ).tokens
    found = [encoded(Conversation(prompt=CHAT, answer=answer), tokenizer, *ends) for answer in ("a", "so...b")]
    assert found == [part.tolist() for part in np.split(trained.tokens, trained.offsets[1:-1])]
    assert [tokenizer.decode(tokens) for tokens in found] == [f"?Say a word.!{answer}?" for answer in ("a", "so...b")]


def test_a_chat_template_without_end_is_named(reward_model, monkeypatch, scoring):
    monkeypatch.setattr("rlcore_reward_model.scorer.TEMPLATE_S", 0.2)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    tokenizer.chat_template = "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
    with pytest.raises(TimeoutError, match=r"chat template .* 0\.2 s"):
        encoded(Conversation(prompt=CHAT, answer="word"), tokenizer)


def test_what_is_too_long_fails_alone(scoring):
    good, long = score(scoring, [CONVERSATIONS[0], Conversation(prompt="x" * 100, answer="y")])
    assert isinstance(good, float)
    assert isinstance(long, Failure)
    assert not long.is_the_models
    assert "102 tokens" in long.reason


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model.norm.weight": torch.full((32,), torch.nan)}, "NaN or infinite numbers in model.norm.weight"),
        ({"v_head.weight": torch.ones(1, 32)}, "v_head.weight in the weights"),
        ({"lm_head.weight": torch.ones(1, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, ""),
    ],
)
def test_weights_are_held_to_the_rule_of_trained_models(reward_model, tmp_path, changes, found):
    shutil.copytree(reward_model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | changes, file, metadata={"format": "pt"})
    (scored,) = score(Scoring(path=str(tmp_path / "model"), device="cpu", dtype="float32"), CONVERSATIONS[:1])
    assert found in scored.reason if found else not isinstance(scored, Failure)


def test_a_model_that_cannot_be_loaded_fails_for_all(tmp_path):
    for path, reason in ((tmp_path, "cannot be loaded"), (make_model(tmp_path / "language", "qwen3"), "labels")):
        (failure,) = score(Scoring(path=str(path), device="cpu", dtype="float32"), CONVERSATIONS[:1])
        assert failure.is_the_models
        assert reason in failure.reason


TOOL = {"type": "function", "function": {"name": "look"}}
CALLED = ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}, *CHAT)


@pytest.mark.parametrize(
    ("prompt", "tools", "template", "fault"),
    [
        (CHAT, (TOOL,), "{{ tools }}", None),
        (CHAT, (TOOL,), "", "tools"),
        (CALLED, (), "{{ messages[0].tool_calls }}", None),
        (CALLED, (), "", "tool_calls"),
        (({**CHAT[0], "reasoning_content": "r"},), (), "", "reasoning_content"),
        (({**CHAT[0], "thinking": "r"},), (), "{{ enable_thinking }}", "thinking"),
        (CALLED, (), {"default": "", "tool_use": "{{ messages[0].tool_calls }}"}, "tool_calls"),
        (CALLED, (TOOL,), {"default": "", "tool_use": "{{ messages[0].tool_calls }}{{ tools }}"}, None),
    ],
)
def test_what_the_reward_models_template_never_shows_is_refused(reward_model, prompt, tools, template, fault):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    named = template if isinstance(template, dict) else {"default": template}
    texts = {name: text + "{% for m in messages %}{{ m.content }};{% endfor %}" for name, text in named.items()}
    tokenizer.chat_template = texts if isinstance(template, dict) else texts["default"]
    conversation = Conversation(prompt=prompt, answer="word", tools=tools)
    if fault is None:
        assert "look" in tokenizer.decode(encoded(conversation, tokenizer))
        return
    with pytest.raises(ValueError, match=f"found {fault}"):
        encoded(conversation, tokenizer)
