"""Checks of what a trainer keeps: through refused steps, checkpoints, moves to the host, and its end."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    BoundError,
    CheckpointError,
    LossSpec,
    ModelSpec,
    NonFiniteError,
    Provider,
    RlcoreError,
    TokenBatch,
    capabilities,
)
from rlcore.spi.lifecycle import Place
from rlcore_conformance.references.fixtures import Device, require
from rlcore_conformance.references.probe import LARGEST_SURPRISE, TOKEN_SHARE
from rlcore_conformance.references.reference import reference_logprobs
from rlcore_conformance.references.tensors import num_bytes
from rlcore_conformance.trainers.batches import arrange, spoiled
from rlcore_conformance.trainers.step_outcome import assert_same_step, assert_same_weights
from rlcore_conformance.trainers.trainer_fixtures import BaselineRun, OpenTrainer, TrainerFixtures, TrainerUnderTest, with_loss
from rlcore_torchkit.transformers_import import import_transformers

Places: TypeAlias = tuple[Place, Place]
ON_DEVICE: Places = ("device", "device")
"""The places of weights and of the optimizer's state."""
ON_HOST: Places = ("host", "host")
STATE_ON_HOST: Places = ("device", "host")


@contextmanager
def refused(
    error: type[RlcoreError], open_trainer: OpenTrainer, baseline_run: BaselineRun
) -> Iterator[tuple[TrainerUnderTest, pytest.ExceptionInfo[Any]]]:
    """A trainer after one update, which refuses the second with `error`: its weights stay, and the next step is the one that
    would have followed."""
    with open_trainer() as trainer:
        before = trainer.outcome((baseline_run.batch,), 0).weights
        with pytest.raises(error) as raised:
            yield trainer, raised
        after = trainer.weights(1)
        assert_same_weights(after, before)
        assert_same_step(trainer.outcome((baseline_run.other,), 1), baseline_run.steps[1], after)


class TrainerLifecycle(TrainerFixtures):
    """Each check compares with a trainer to which nothing happened."""

    @pytest.mark.parametrize("poison", ["loss", "gradient"])
    def test_step_that_is_not_finite_is_refused_and_leaves_the_state(
        self, open_trainer: OpenTrainer, loss: LossSpec, baseline_run: BaselineRun, poison: str
    ) -> None:
        """Weights, optimizer and version stay, and the next step is the one that would have followed."""
        last = spoiled(baseline_run.other) if poison == "loss" else baseline_run.other
        with refused(NonFiniteError, open_trainer, baseline_run) as (trainer, _):
            trainer.step((baseline_run.batch, last), 1, loss=with_loss(loss, poison_gradient=poison == "gradient"))

    @pytest.mark.parametrize("metric", [TOKEN_SHARE, LARGEST_SURPRISE])
    def test_step_over_a_bound_is_refused_and_leaves_the_state(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, metric: str
    ) -> None:
        """The figure of the whole step counts, a sum or a maximum over microbatches; the error names metric and value."""
        require(provider, capabilities.METRIC_BOUNDS)
        value = baseline_run.steps[1].result.metrics[metric]
        bounds = {TOKEN_SHARE: 2.0, LARGEST_SURPRISE: 1e6, "probe/not_reported": 0.0, metric: 0.95 * value}
        with refused(BoundError, open_trainer, baseline_run) as (trainer, raised):
            trainer.step(arrange(baseline_run.other, "apart"), 1, bounds=bounds)
        assert raised.value.metrics == {metric: pytest.approx(value, rel=1e-4)}
        shown = [float(number) for number in re.findall(r"\d+\.?\d*(?:e[+-]\d+)?", str(raised.value))]
        assert metric in str(raised.value), f"the message does not name {metric}: {raised.value}"
        assert pytest.approx(value, rel=1e-2) in shown, f"the message does not name {value}: {raised.value}"

    def test_bounds_that_hold_change_nothing(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun
    ) -> None:
        """The step is the one without bounds; a metric that the loss does not report has none."""
        require(provider, capabilities.METRIC_BOUNDS)
        bounds = {name: value + 1e-3 * abs(value) for name, value in baseline_run.steps[0].result.metrics.items()}
        with open_trainer() as trainer:
            found = trainer.outcome((baseline_run.batch,), 0, bounds={**bounds, "probe/not_reported": -1.0})
        assert_same_step(found, baseline_run.steps[0], baseline_run.before)

    def test_step_returns_the_logprobs_it_trained_on(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, tolerance: float
    ) -> None:
        """Each microbatch's, at the weights before the update and at the step's temperature; the step is the one without."""
        require(provider, capabilities.STEP_LOGPROBS)
        microbatches = (baseline_run.other, baseline_run.batch)
        with open_trainer() as trainer:
            asked = trainer.outcome((baseline_run.batch,), 0, logprobs=True)
            assert_same_step(asked, baseline_run.steps[0], baseline_run.before)
            expected = trainer.logprobs(microbatches, 1, temperature=0.7)
            found = trainer.step(microbatches, 1, temperature=0.7, logprobs=True).logprobs
            assert found is not None
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)

    def test_state_loaded_continues_exactly(
        self, open_trainer: OpenTrainer, baseline_run: BaselineRun, device: Device, tmp_path: Path
    ) -> None:
        """A trainer that has trained on something else continues exactly too."""
        with open_trainer() as trainer:
            trainer.step((baseline_run.batch,), 0)
            trainer.step((baseline_run.other,), 1)
            files = trainer.save(tmp_path)
        assert files, "save_state names no files"
        assert all((tmp_path / name).is_file() for name in files)
        with open_trainer() as trainer:
            trainer.step((baseline_run.other,), 0)
            assert trainer.load(tmp_path) == 2
            restored = trainer.weights(2)
            found = trainer.outcome((baseline_run.batch, baseline_run.other), 2)
        if device != "cpu":
            assert_same_step(found, baseline_run.steps[2], restored)
            return
        assert found.result == baseline_run.steps[2].result
        assert_same_weights(restored, baseline_run.steps[1].weights)
        assert_same_weights(found.weights, baseline_run.steps[2].weights)

    def test_saving_changes_nothing(self, open_trainer: OpenTrainer, baseline_run: BaselineRun, tmp_path: Path) -> None:
        """The step after a save is the step without one."""
        with open_trainer() as trainer:
            trainer.step((baseline_run.batch,), 0)
            trainer.save(tmp_path)
            assert_same_step(trainer.outcome((baseline_run.other,), 1), baseline_run.steps[1], baseline_run.steps[0].weights)

    def test_reference_is_the_initial_policy_after_loading(
        self, provider: Provider, open_trainer: OpenTrainer, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """After a state is loaded, the reference is still the initial policy and not the loaded one."""
        require(provider, capabilities.REFERENCE_POLICY)
        with open_trainer() as trainer:
            (initial,) = trainer.logprobs((batch,), 0, model="reference")
            trainer.step((batch,), 0)
            trainer.save(tmp_path)
        with open_trainer() as trainer:
            trainer.load(tmp_path)
            np.testing.assert_array_equal(trainer.logprobs((batch,), 1, model="reference")[0], initial)

    def test_damaged_state_is_refused(self, open_trainer: OpenTrainer, batch: TokenBatch, tmp_path: Path) -> None:
        """A state whose largest file lost its end is refused."""
        with open_trainer() as trainer:
            trainer.step((batch,), 0)
            files = trainer.save(tmp_path)
        largest = max((tmp_path / name for name in files), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        with open_trainer() as trainer, pytest.raises(CheckpointError):
            trainer.load(tmp_path)

    def test_moving_to_the_host_and_back_changes_nothing(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, device: Device, tmp_path: Path
    ) -> None:
        """Log-probabilities and exports work with the optimizer on the host, saving and loading with all of it; the step after
        is the step without the moves."""
        require(provider, capabilities.RESIDENCY)
        with open_trainer() as trainer:
            trainer.step((baseline_run.batch,), 0)
            before, (logprobs,) = trainer.weights(1), trainer.logprobs((baseline_run.other,), 1)
            resident = trainer.move(*ON_DEVICE)
            assert resident > 0, "a trainer on its device holds no bytes there"
            trainer.move(*STATE_ON_HOST)
            np.testing.assert_array_equal(trainer.logprobs((baseline_run.other,), 1)[0], logprobs)
            assert_same_weights(trainer.weights(1), before)
            moved = trainer.move(*ON_HOST)
            # What is left may be a workspace that is larger than this small model: then what has gone counts.
            gone, least = resident - moved, 3 * num_bytes(before)
            assert device == "cpu" or moved < resident / 4 or gone >= least, (
                f"on the host it still holds {moved} of {resident} bytes; expected a fourth of them, or {least} fewer: "
                "those of weights and moments"
            )
            trainer.save(tmp_path)
            trainer.load(tmp_path)
            trainer.move(*ON_DEVICE)
            np.testing.assert_array_equal(trainer.logprobs((baseline_run.other,), 1)[0], logprobs)
            assert_same_step(trainer.outcome((baseline_run.other,), 1), baseline_run.steps[1], before)

    def test_reference_stays_through_sleep_and_steps(
        self, trainer: TrainerUnderTest, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """The reference stays the same through sleep, updates, log-probabilities of the policy, exports, saving and loading."""
        trainer.require(capabilities.REFERENCE_POLICY)
        trainer.require(capabilities.RESIDENCY)
        (initial,) = trainer.logprobs((batch,), 0, model="reference")
        for version in range(2):
            for places in (ON_HOST, ON_DEVICE):
                trainer.move(*places)
            found = {"waking": trainer.logprobs((batch,), version, model="reference")[0]}
            folder = tmp_path / str(version)
            folder.mkdir()
            trainer.step((batch,), version)
            events: dict[str, Callable[[], object]] = {
                "a step": lambda: None,
                "the policy's log-probabilities": partial(trainer.logprobs, (batch,), version + 1),
                "an export": partial(trainer.weights, version + 1),
                "saving": partial(trainer.save, folder),
                "loading": partial(trainer.load, folder),
                "sending its state away": partial(trainer.move, *STATE_ON_HOST),
            }
            for when, happens in events.items():
                happens()
                found[when] = trainer.logprobs((batch,), version + 1, model="reference")[0]
            for when, logprobs in found.items():
                np.testing.assert_array_equal(logprobs, initial, err_msg=f"after {when} the reference is another")

    def test_resident_state_is_accepted_and_measured(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """Every trainer accepts it, whatever it declares, and then holds the weights at the least."""
        (before,) = trainer.logprobs((batch,))
        found = trainer.move(*ON_DEVICE)
        least = num_bytes(trainer.weights())
        assert found >= least, f"device_bytes: found {found}; expected at least {least}, the size of the weights"
        np.testing.assert_array_equal(trainer.logprobs((batch,))[0], before)

    def test_closed_trainer_leaves_room_for_another(self, open_trainer: OpenTrainer, batch: TokenBatch) -> None:
        """Built anew it is the same trainer."""
        with open_trainer() as trainer:
            first = trainer.outcome((batch,), 0)
        with open_trainer() as trainer:
            before = trainer.weights()
            assert_same_step(trainer.outcome((batch,), 0), first, before)

    def test_hf_directory_is_the_exported_model(
        self, trainer: TrainerUnderTest, model: ModelSpec, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """Loaded by from_pretrained it has the trainer's log-probabilities."""
        trainer.require(capabilities.SAVE_HF)
        trainer.step((batch,), 0)
        trainer.save(tmp_path, "hf")
        import_transformers()
        from transformers import AutoModelForCausalLM

        from rlcore_conformance.references.huggingface_reference import HuggingFacePolicy

        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            dtype="float32",
            attn_implementation="eager",
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
        )
        expected, _ = reference_logprobs(HuggingFacePolicy(loaded), batch, 1.0)
        trainer.assert_near(trainer.logprobs((batch,), 1)[0], expected)

    def test_reference_is_the_model_that_is_named(
        self, open_trainer: OpenTrainer, model: ModelSpec, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """With TrainerContext.reference it is that model, before an update and after one, and the policy is the usual one."""
        with open_trainer() as trainer:
            trainer.require(capabilities.REFERENCE_MODEL)
            trainer.require(capabilities.SAVE_HF)
            (initial,) = trainer.logprobs((batch,))
            trainer.step((batch,), 0)
            (trained,) = trainer.logprobs((batch,), 1)
            trainer.save(tmp_path, "hf")
        assert not np.array_equal(trained, initial)
        with open_trainer(reference=evolve(model, path=str(tmp_path))) as trainer:
            np.testing.assert_array_equal(trainer.logprobs((batch,))[0], initial)
            for version in (0, 1):
                (found,) = trainer.logprobs((batch,), version, model="reference")
                trainer.assert_near(found, trained)
                trainer.step((batch,), version)

    def test_a_reference_alone_says_what_it_says_beside_a_policy(
        self, provider: Provider, open_trainer: OpenTrainer, batch: TokenBatch
    ) -> None:
        """Without a policy it is the same model, also after its weights were away, and holds fewer bytes."""
        require(provider, capabilities.REFERENCE_ALONE)
        with open_trainer() as trainer:
            (expected,) = trainer.logprobs((batch,), model="reference")
            both = trainer.move(*ON_DEVICE)
        with open_trainer(needs_policy=False) as trainer:
            np.testing.assert_array_equal(trainer.logprobs((batch,), model="reference")[0], expected)
            alone = trainer.move(*ON_DEVICE)
            if capabilities.RESIDENCY in provider.capabilities:
                trainer.move(*ON_HOST)
                trainer.move(*ON_DEVICE)
            np.testing.assert_array_equal(trainer.logprobs((batch,), model="reference")[0], expected)
        assert alone < both or both == 0, "a device that is not counted"
