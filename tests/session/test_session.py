"""Samples, gradients, updates and checkpoints of a session, against torch and against other sessions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.spi import CheckpointError, FinishReason, GlobalCounts, LossSpec
from rlcore_session import Datum
from rlcore_session.loss_functions import NoOptions

DATA = [Datum([1, 3, 5, 7, 9]), Datum([2, 4, 6], loss_mask=[False, False, True])]
PROMPTS = ["1+2=", [{"role": "user", "content": "3"}], [5, 6, 7]]


def learn(session, data=DATA, loss="cross_entropy", **options):
    """One update; what forward_backward returned."""
    gradients = session.forward_backward(data, loss, **options)
    session.optim_step()
    return gradients


def policy(session):
    """Log-probabilities of some sequences, which tell weights apart."""
    return np.concatenate(session.logprobs([[1, 2, 3, 4, 5, 6], [9, 8, 7, 1]]))


def test_versions_of_trainer_and_sampler(opened):
    session = opened()
    assert (session.weight_version, session.sampler_version) == (0, 0)
    before = session.sample(["1+2="], num_samples=8, seed=1)
    learn(session)
    assert (session.weight_version, session.sampler_version) == (1, 0)
    same = session.sample(["1+2="], num_samples=8, seed=1)
    for one, other in zip(before[0], same[0], strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs, "the trainer's update reached the sampler without a sync")
        assert other.weight_version == 0
    assert session.sync() == 1
    assert session.sampler_version == 1
    new = session.sample(["1+2="], num_samples=8, seed=1)
    assert {one.weight_version for one in new[0]} == {1}
    assert any(not np.array_equal(one.logprobs, other.logprobs) for one, other in zip(before[0], new[0], strict=True))


def test_seeds_decide_samples(shared):
    first = shared.sample(["1+2=", "3"], num_samples=3, seed=7)
    again = shared.sample(["1+2=", "3"], num_samples=3, seed=7)
    assert [len(group) for group in first] == [3, 3]
    flat = [[one.tokens.tolist() for group in groups for one in group] for groups in (first, again)]
    assert flat[0] == flat[1]
    drawn = [[one.tokens.tolist() for group in shared.sample(["1+2="], num_samples=8) for one in group] for _ in range(2)]
    assert drawn[0] != drawn[1], "calls without a seed draw anew"


def test_prompts_of_all_kinds_and_limits(shared):
    tokens = shared.tokenizer.encode("1+2=")
    text, ids = (shared.sample([prompt], temperature=0, max_tokens=3)[0][0] for prompt in ("1+2=", tokens))
    assert text.tokens.tolist() == ids.tokens.tolist()
    assert text.text == shared.tokenizer.decode(text.tokens)
    longest = shared.sample([[1] * 11], max_tokens=None)[0][0]
    assert len(longest.tokens) == 1, "the room that 12 tokens leave"
    for group in shared.sample(["1+2="] * 4, num_samples=4, max_tokens=2, seed=0):
        for one in group:
            assert len(one.tokens) == len(one.logprobs) <= 2
            stops = one.tokens[-1] in shared.tokenizer.stop_token_ids
            assert one.finish_reason == (FinishReason.STOP if stops else FinishReason.LENGTH)


def test_trainer_agrees_with_the_sampler_and_with_transformers(shared, model):
    prompt = shared.tokenizer.encode("1+2=")
    [samples] = shared.sample([prompt], num_samples=6, seed=3, temperature=0.7)
    sequences = [[*prompt, *one.tokens.tolist()] for one in samples]
    for sample, found in zip(samples, shared.logprobs(sequences, temperature=0.7), strict=True):
        assert found[0] == 0.0
        np.testing.assert_allclose(found[len(prompt) :], sample.logprobs, atol=1e-4)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for tokens, found in zip(sequences, shared.logprobs(sequences), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[1:], plain(reference, tokens), atol=1e-4)


def plain(model, tokens):
    """Log-probabilities of all tokens but the first by transformers, float32 [T-1]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy()


def test_pieces_add_up_with_given_counts(opened):
    whole, pieces = opened(), opened()
    total = learn(whole)
    counts = GlobalCounts(num_loss_tokens=5, num_loss_sequences=2)
    parts = [pieces.forward_backward([one], counts=counts) for one in DATA]
    pieces.optim_step()
    assert sum(part.loss for part in parts) == pytest.approx(total.loss, rel=1e-6)
    np.testing.assert_allclose(policy(pieces), policy(whole), atol=1e-6)


def curved(logprobs):
    """A loss that is neither linear nor a sum over tokens, and compares sequences."""
    margin = logprobs[0].sum() - 2 * logprobs[1].sum()
    return torch.nn.functional.softplus(margin) + (logprobs[0] ** 2).sum()


def test_callers_loss_has_the_gradient_of_autograd(opened):
    def derivatives(logprobs):
        leaves = [torch.tensor(one, requires_grad=True) for one in logprobs]
        curved(leaves).backward()
        return [leaf.grad.numpy() * (np.arange(len(leaf)) > 0) for leaf in leaves]

    data = [Datum([1, 3, 5, 7, 9]), Datum([2, 4, 6])]
    session = opened(optimizer={"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": 0.0})
    model = AutoModelForCausalLM.from_pretrained(session.plan.recipe.model.path, dtype=torch.float32)
    logprobs = [
        torch.cat(
            [
                torch.zeros(1),
                model(torch.tensor([one.tokens])).logits[0].log_softmax(-1)[range(len(one.tokens) - 1), one.tokens[1:]],
            ]
        )
        for one in data
    ]
    curved(logprobs).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in set(model.parameters()) if parameter.grad is not None]).norm()
    gradients = session.forward_backward(data, derivatives)
    for found, expected in zip(gradients.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(found, expected.detach(), atol=1e-5)
    assert session.optim_step().grad_norm == pytest.approx(float(norm), rel=1e-4)
    spec = session.plan.recipe.optimizer
    expected = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=spec.betas, eps=spec.eps, weight_decay=0.0)
    expected.step()
    np.testing.assert_allclose(session.logprobs([[1, 2, 3, 4]])[0][1:], plain(model, [1, 2, 3, 4]), atol=2e-3)


def test_callers_loss_equals_the_named_one(opened):
    named, own = opened(), opened()
    weights = [np.array([0, 1, 2, 0.5, -1.0]), np.array([0, 0, 3.0])]
    data = [Datum(one.tokens, one.loss_mask, {"weights": weight}) for one, weight in zip(DATA, weights, strict=True)]
    given = learn(named, data)
    found = learn(own, DATA, lambda _: [-weight / 5 for weight in weights])
    assert found.loss == pytest.approx(given.loss, rel=1e-5)
    np.testing.assert_allclose(policy(own), policy(named), atol=1e-6)


def test_settings_of_an_update(opened):
    session = opened(schedule={"warmup_steps": 4})
    session.forward_backward(DATA)
    before = policy(session)
    update = session.optim_step(learning_rate=0.0)
    assert (update.weight_version, update.learning_rate) == (1, 0.0)
    np.testing.assert_array_equal(policy(session), before)
    session.forward_backward(DATA)
    assert session.optim_step(betas=(0.5, 0.5), eps=1e-3, weight_decay=0.1, max_grad_norm=1.0).learning_rate == pytest.approx(
        5e-3
    )


@pytest.mark.parametrize("name", ["clipped", "cispo", "policy_gradient"])
def test_objectives_by_name(opened, name):
    session = opened()
    [samples] = session.sample(["1+2="], num_samples=4, seed=0)
    prompt = session.tokenizer.encode("1+2=")
    before = None
    for _ in range(3):
        data = [
            Datum(
                [*prompt, *one.tokens.tolist()],
                [False] * len(prompt) + [True] * len(one.tokens),
                {
                    "advantages": np.r_[np.zeros(len(prompt)), np.full(len(one.tokens), 1.0 if number == 0 else -0.3)],
                    "generation_logprobs": np.r_[np.zeros(len(prompt)), one.logprobs],
                },
            )
            for number, one in enumerate(samples)
        ]
        gradients = learn(session, data, name, config={"entropy_coefficient": 0.01})
        if before is None:
            before = gradients
            assert gradients.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
            assert gradients.metrics["entropy"] > 0
    gain = [
        float(found[len(prompt) :].sum() - old[len(prompt) :].sum())
        for found, old in zip(gradients.logprobs, before.logprobs, strict=True)
    ]
    assert gain[0] > max(gain[1:]), "the sample of positive advantage gained most"


def test_previous_logprobs_of_the_data_are_the_denominator(opened):
    session = opened()
    ones = {"advantages": [0, 1.0, 1, 1, 1], "generation_logprobs": [0, -1.0, -1, -1, -1]}
    own = session.logprobs([DATA[0].tokens])[0]
    given = session.forward_backward([Datum(DATA[0].tokens, None, ones | {"previous_logprobs": own})], "clipped")
    assert given.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    far = session.forward_backward([Datum(DATA[0].tokens, None, ones)], "clipped")
    expected = np.exp(np.clip(own[1:] + 1.0, -20, 20)).mean()
    assert far.metrics["ratio_mean"] == pytest.approx(float(expected), rel=1e-4)


def test_losses_by_path_and_spec(opened):
    session = opened()
    path = "rlcore_session.loss_functions:cross_entropy"
    found = [
        session.forward_backward(DATA, loss, config=config).loss
        for loss, config in (("cross_entropy", None), (path, NoOptions()), (LossSpec(path=path, config=NoOptions()), None))
    ]
    assert found[0] == found[1] == found[2]


def test_reference_stays(opened):
    session = opened(reference=True)
    sequences = [[1, 2, 3, 4, 5, 6]]
    before = session.logprobs(sequences)[0]
    learn(session)
    np.testing.assert_allclose(session.logprobs(sequences, model="reference")[0], before, atol=1e-6)
    assert not np.allclose(session.logprobs(sequences)[0], before, atol=1e-3)


def test_checkpoints(opened, tmp_path: Path):
    session, other, fresh = opened(), opened(), opened()
    for _ in range(2):
        learn(session)
    path = session.save(tmp_path / "saved")
    assert path.name == "step-000002"
    saved = policy(session)
    assert other.load(tmp_path / "saved") == other.weight_version == other.sampler_version == 2
    assert fresh.load(path, optimizer=False) == 2
    for one in (other, fresh):
        np.testing.assert_array_equal(policy(one), saved)
        assert one.sample(["1+2="], seed=0)[0][0].weight_version == 2
    for one in (session, other, fresh):
        learn(one)
    np.testing.assert_array_equal(policy(other), policy(session))
    assert not np.array_equal(policy(fresh), policy(session)), "without moments the update is another"


def test_checkpoint_of_a_session_goes_back(opened, tmp_path: Path):
    session = opened()
    path, before = session.save(tmp_path), policy(session)
    samples = session.sample(["1+2="], num_samples=4, seed=0)[0]
    learn(session)
    session.sync()
    session.load(path)
    np.testing.assert_array_equal(policy(session), before)
    again = session.sample(["1+2="], num_samples=4, seed=0)[0]
    assert [one.tokens.tolist() for one in again] == [one.tokens.tolist() for one in samples]


def test_nothing_to_load(shared, tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        shared.load(tmp_path)


def test_exported_model_is_the_policy(opened, tmp_path: Path):
    session = opened()
    learn(session)
    session.export(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    np.testing.assert_allclose(session.logprobs([[1, 2, 3, 4]])[0][1:], plain(exported, [1, 2, 3, 4]), atol=1e-4)


def test_adapters_are_exported(opened, tmp_path: Path):
    session = opened(lora={"rank": 2})
    learn(session)
    assert (session.export(tmp_path / "adapter", kind="peft") / "adapter_config.json").is_file()
