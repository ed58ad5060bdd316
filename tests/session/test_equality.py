"""A session's updates are those of the project's own trainer and loop: bit for bit, and figure for figure."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import rlcore
from rlcore.config.load import Origin
from rlcore.run.data.text import tokenizers
from rlcore.run.execution.context import execution
from rlcore.run.report.progress import Progress
from rlcore.spi import LossSpec, SaveStateRequest, TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import Minibatch
from rlcore_session import Completion, Datum
from rlcore_session.loss_functions import NoOptions
from rlcore_session.plan import plan_of

from .session_support import recipe_of

SEQUENCES = [[1, 3, 5, 7, 9, 11, 2, 4], [2, 4, 6, 8, 3, 1, 5], [5, 6, 7, 8, 9, 10], [9, 1, 2, 3, 4]]
LOSS = LossSpec(path="rlcore_session.loss_functions:cross_entropy", config=NoOptions())
TRAINING = {"training": {"max_tokens_per_microbatch": 8}}


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_pieces_and_update_equal_one_train_step_bit_for_bit(model, tmp_path, opened):
    """Each sequence is a microbatch of the step, and a piece of the session's: the longest first, as a step orders them."""
    recipe = recipe_of(model, **TRAINING)
    plan = plan_of(recipe, (), Origin(label="a test", directory=tmp_path), reference=False)
    lengths = [len(one) for one in SEQUENCES]
    batch = TokenBatch(
        tokens=np.concatenate(SEQUENCES).astype(np.int32),
        offsets=offsets_of(lengths),
        loss_mask=np.concatenate([np.arange(length) > 0 for length in lengths]),
    )
    counts = batch.counts()
    with execution(plan, tokenizers().load_tokenizer(plan.recipe.model), None, Progress()) as opening, opening() as backends:
        minibatch = Minibatch(batch=batch, sequences=np.arange(4), counts=counts, schedule_step=0)
        expected, logprobs = backends.trainer.train_step(minibatch, LOSS, 0, bounds={}, logprobs=True)
        (tmp_path / "expected").mkdir()
        backends.trainer.save_state(SaveStateRequest(directory=tmp_path / "expected", kind="hf"))
    session = opened(**TRAINING)
    parts = [session.forward_backward([Datum(tokens)], counts=counts) for tokens in SEQUENCES]
    update = session.optim_step()
    session.export(tmp_path / "found")
    assert update.grad_norm == expected.grad_norm
    assert sum(part.loss for part in parts) == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_array_equal(np.concatenate([part.logprobs[0] for part in parts]), logprobs)
    found, wanted = weights_of(tmp_path / "found"), weights_of(tmp_path / "expected")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor, name)


def test_loop_over_a_runs_samples_repeats_its_figures(model, tmp_path, opened):
    """Three steps of GRPO: the run's samples and rewards, trained on by a session."""
    sections = {
        "run": {"device": "cpu", "num_steps": 3, "directory": str(tmp_path)},
        "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 2, "samples_per_prompt": 8},
    }
    rows = [{"prompt": f"{a}+{b}="} for a in range(3) for b in range(3)]
    trained = recipe_of(
        model, algorithm={"name": "grpo"}, training={"prompts_per_step": 9}, logging={"rollouts_every_n_steps": 1}
    )
    run = rlcore.train(
        {**trained, **sections}, reward=lambda completion: float(completion[:1] in "135"), dataset=rows, progress="silent"
    )
    session = opened(**sections)
    for step in range(3):
        groups: dict[int, list[dict]] = {}
        for sample in run.samples(step + 1).to_pylist():
            groups.setdefault(sample["group"], []).append(sample)
        data = []
        for group in groups.values():
            rewards = np.array([sample["reward"] for sample in group], np.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            data += [Datum.of(completion_of(sample), advantages=one) for sample, one in zip(group, advantages, strict=True)]
        gradients = session.forward_backward(data, "clipped")
        update = session.optim_step()
        session.sync()
        expected = {name: float(values[step]) for name, values in run.metrics.items()}
        assert gradients.loss == pytest.approx(expected["loss"], abs=2e-6), f"step {step + 1}"
        assert update.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert gradients.metrics["ratio_mean"] == pytest.approx(expected["ratio_mean"], rel=1e-5)
        # A sample of the next step's weights is what the run's generator gave at them.
        if step < 2:
            sample = completion_of(run.samples(step + 2).to_pylist()[0])
            found = session.logprobs([[*sample.prompt, *sample.tokens]])[0][len(sample.prompt) :]
            np.testing.assert_allclose(found, sample.logprobs, atol=1e-4)


def completion_of(sample: dict) -> Completion:
    """A sample of a run's rollouts."""
    mask = np.array(sample["loss_mask"])
    tokens = np.array(sample["tokens"], np.int32)
    return Completion(tokens[mask], np.array(sample["generation_logprobs"], np.float32)[mask], "", 0, 0, tokens[~mask])
