"""What the process of a reward model answers, against the model called on each sequence alone."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlcore.testing.models import make_model
from rlcore_reward.scorer import Conversation, Failure, Scoring, score, tokens_of

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


def test_a_batch_has_the_rewards_that_each_text_has_alone(scoring):
    texts = ["1+1=2", "a longer question? with a longer answer", "user: Say a word.\nassistant: word", "1+1="]
    expected = [alone(scoring.path, text) for text in texts]
    assert score(scoring, CONVERSATIONS) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(expected)


def test_a_template_that_ends_an_answer_itself_gets_no_second_end(scoring):
    tokenizer = AutoTokenizer.from_pretrained(scoring.path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>\n{% endfor %}"
    tokens = tokens_of(CONVERSATIONS[2], tokenizer)
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokens.count(tokenizer.eos_token_id) == 2


def test_what_is_too_long_fails_alone(scoring):
    good, long = score(scoring, [CONVERSATIONS[0], Conversation(prompt="x" * 100, answer="y")])
    assert isinstance(good, float)
    assert isinstance(long, Failure)
    assert not long.is_the_models
    assert "102 tokens" in long.reason


def test_a_model_that_cannot_be_loaded_fails_for_all(tmp_path):
    for path, reason in ((tmp_path, "cannot be loaded"), (make_model(tmp_path / "language", "qwen3"), "labels")):
        (failure,) = score(Scoring(path=str(path), device="cpu", dtype="float32"), CONVERSATIONS[:1])
        assert failure.is_the_models
        assert reason in failure.reason
