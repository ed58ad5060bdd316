"""How the kit builds a trainer and talks to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from attrs import evolve, frozen

from rlcore.registry.binding import build_trainer
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.spi import (
    ADVANTAGES,
    PREVIOUS_LOGPROBS,
    DtypeName,
    ExportWeightsRequest,
    GlobalCounts,
    LoadStateRequest,
    LogprobsRequest,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    Provider,
    RankInfo,
    SaveStateRequest,
    SetResidencyRequest,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
    TrainStepResult,
    ValuesRequest,
    capabilities,
)
from rlcore.spi.arrays import AnyArray, Float32Array
from rlcore.spi.lifecycle import Place
from rlcore_conformance.references.fixtures import BackendFixtures, Device, entry_of, require
from rlcore_conformance.references.probe import ProbeConfig, expected_probe
from rlcore_conformance.references.reference import Reference, ReferencePolicy, reference_logprobs
from rlcore_conformance.references.tensors import Values, collect
from rlcore_conformance.trainers.batches import MAX_SEQUENCE_LENGTH, counts_of, make_batch
from rlcore_conformance.trainers.step_outcome import StepOutcome, assert_close, assert_same_names, assert_same_step

ENTROPY_COEFFICIENT = 0.3
NARROW_DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float16")


@frozen(kw_only=True, eq=False)
class TrainerUnderTest:
    """A trainer's handle, with the calls that the checks repeat."""

    handle: TrainerHandle
    provider: Provider
    loss: LossSpec
    tolerance: float
    """Most that a log-probability may be off, in nats."""
    reference: Reference | None = None

    @property
    def gradient_tolerance(self) -> float:
        """Most that the norm of a gradient may be off, as a share of it."""
        return 10 * self.tolerance

    def require(self, capability: str) -> None:
        """Skip the test unless the trainer declares the capability."""
        require(self.provider, capability)

    def policy(self, weight_version: int = 0) -> ReferencePolicy:
        """The reference with the weights that the trainer exports."""
        assert self.reference is not None
        return self.reference.load(self.weights(weight_version))

    def request(
        self,
        batches: tuple[TokenBatch, ...],
        weight_version: int = 0,
        *,
        temperature: float = 1.0,
        loss: LossSpec | None = None,
        counts: GlobalCounts | None = None,
        **options: Any,
    ) -> TrainStepRequest:
        """The request of one update; the counts are those of the batches unless given. `options` are further fields."""
        return TrainStepRequest(
            microbatches=batches,
            counts=counts or counts_of(batches),
            loss=loss or self.loss,
            temperature=temperature,
            weight_version=weight_version,
            **options,
        )

    def step(self, batches: tuple[TokenBatch, ...], weight_version: int = 0, **options: Any) -> TrainStepResult:
        """One update; `options` are those of `request`."""
        return self.handle.train_step(self.request(batches, weight_version, **options))

    def outcome(self, batches: tuple[TokenBatch, ...], weight_version: int = 0, **options: Any) -> StepOutcome:
        """One update and the weights after it."""
        return self.after(self.step(batches, weight_version, **options))

    def after(self, result: TrainStepResult, *, max_bucket_bytes: int = 1 << 20) -> StepOutcome:
        """An update that was made, and the weights after it."""
        weights = self.weights(result.weight_version, max_bucket_bytes=max_bucket_bytes)
        return StepOutcome(result=result, weights=weights, tolerance=self.tolerance)

    def logprobs(
        self,
        batches: tuple[TokenBatch, ...],
        weight_version: int = 0,
        *,
        model: Literal["policy", "reference"] = "policy",
        temperature: float = 1.0,
    ) -> tuple[Float32Array, ...]:
        """Log-probabilities, one array a batch."""
        return self.handle.get_logprobs(
            LogprobsRequest(
                microbatches=batches, model=model, temperature=temperature, entropy=False, weight_version=weight_version
            )
        ).logprobs

    def values(self, batches: tuple[TokenBatch, ...], weight_version: int = 0) -> tuple[Float32Array, ...]:
        """Values after each token, one array a batch."""
        return self.handle.get_values(ValuesRequest(microbatches=batches, weight_version=weight_version)).values

    def figures(self, batches: tuple[TokenBatch, ...], *, temperature: float) -> tuple[Float32Array, ...]:
        """The output of its head for each token, at version 0: log-probabilities or values."""
        if self.handle.head == "value":
            return self.values(batches)
        return self.logprobs(batches, temperature=temperature)

    def assert_near(self, found: AnyArray, expected: AnyArray, what: str = "") -> None:
        """Assert that log-probabilities, entropies or values are equal within the trainer's tolerance."""
        np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance, err_msg=what)

    def assert_loss(self, result: TrainStepResult, loss: float, metrics: Mapping[str, float]) -> None:
        """Assert that a step reports a loss, and these metrics and no others."""
        assert_close("loss", result.loss, loss, self.tolerance)
        assert_same_names("metrics", result.metrics, metrics)
        for name, expected in metrics.items():
            assert_close(name, result.metrics[name], expected, self.tolerance)

    def assert_grad_norm(self, result: TrainStepResult, expected: float) -> None:
        """Assert that a step reports a gradient's norm."""
        assert_close("grad_norm", result.grad_norm, expected, self.gradient_tolerance)

    def save(self, directory: Path, kind: Literal["resume", "hf", "peft"] = "resume") -> Sequence[str]:
        """Save a state; the names of its files."""
        return self.handle.save_state(SaveStateRequest(directory=directory, kind=kind)).files

    def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """Load a state; its weight version."""
        return self.handle.load_state(LoadStateRequest(directory=directory, optimizer=optimizer)).weight_version

    def move(self, weights: Place, state: Place) -> int:
        """Move weights and optimizer to "device" or "host"; the bytes that it then holds on the device."""
        return self.handle.set_residency(SetResidencyRequest(weights=weights, state=state)).device_bytes

    def entropy(self, batch: TokenBatch, weight_version: int, temperature: float) -> Float32Array:
        """Entropies of one batch."""
        entropy = self.handle.get_logprobs(
            LogprobsRequest(
                microbatches=(batch,), model="policy", temperature=temperature, entropy=True, weight_version=weight_version
            )
        ).entropy
        assert entropy is not None
        return entropy[0]

    def weights(self, weight_version: int = 0, *, max_bucket_bytes: int = 1 << 20) -> Values:
        """A copy of the exported weights, in float32."""
        return collect(self.handle.export_weights(export_request(weight_version, max_bucket_bytes=max_bucket_bytes)))


@frozen(kw_only=True, eq=False)
class BaselineRun:
    """Updates of a trainer to which nothing else happened."""

    batch: TokenBatch
    other: TokenBatch
    """The sequences of the second update; the third has those of both batches."""
    before: Values
    """The weights before the first update."""
    steps: tuple[StepOutcome, StepOutcome, StepOutcome]


_KEPT: dict[str, BaselineRun] = {}
"""The latest, by the trainer and the data it is of."""


class OpenTrainer(Protocol):
    """Opens a fresh trainer; only one is open at a time."""

    def __call__(self, **changes: Any) -> AbstractContextManager[TrainerUnderTest]:
        """`changes` are fields of the context in which it differs from the kit's."""


def export_request(
    weight_version: int,
    *,
    dtype: DtypeName = "float32",
    max_bucket_bytes: int = 1 << 20,
    adapters: Literal["merged", "apart", "alone"] = "merged",
) -> ExportWeightsRequest:
    """A request for the weights."""
    return ExportWeightsRequest(
        weight_version=weight_version, dtype=dtype, max_bucket_bytes=max_bucket_bytes, adapters=adapters
    )


class TrainerFixtures(BackendFixtures):
    """The fixtures of a trainer's checks; each can be overridden."""

    @pytest.fixture
    def loss_path(self) -> str:
        """The probe loss in the trainer's own array type: torch's."""
        return "rlcore_conformance.references.torch_losses:probe_loss"

    @pytest.fixture
    def value_loss_path(self) -> str:
        """The probe loss of values in the trainer's own array type: torch's."""
        return "rlcore_conformance.references.torch_losses:value_probe_loss"

    @pytest.fixture
    def narrow_dtype(self, provider: Provider) -> DtypeName:
        """A dtype narrower than float32 that weights can be exported in: of those declared."""
        for dtype in NARROW_DTYPES:
            if dtype in provider.dtypes:
                return dtype
        pytest.skip(f"{provider.name} declares no dtype narrower than float32")

    @pytest.fixture
    def optimizer(self) -> OptimizerSpec:
        """The optimizer of the trainer; a check that varies it keeps the other fields."""
        return OptimizerSpec(learning_rate=1e-3)

    @pytest.fixture
    def loss(self, provider: Provider, loss_path: str) -> LossSpec:
        """The probe loss, with the entropy where the provider declares it."""
        with_entropy = capabilities.ENTROPY in provider.capabilities
        return LossSpec(
            path=loss_path,
            config=ProbeConfig(entropy_coefficient=ENTROPY_COEFFICIENT if with_entropy else 0.0),
            token_columns=(ADVANTAGES,),
            entropy="loss" if with_entropy else "none",
        )

    @pytest.fixture
    def rank_config(self, config: Any) -> Any:
        """The options with which it runs on two ranks: those of one."""
        return config

    @pytest.fixture
    def trainer_context(self, provider: Provider, model: ModelSpec, device: Device, optimizer: OptimizerSpec) -> TrainerContext:
        """The context from which it is built, as one rank."""
        return TrainerContext(
            model=model,
            rank_info=RankInfo(device=device),
            seed=0,
            num_train_steps=100,
            needs_reference=capabilities.REFERENCE_POLICY in provider.capabilities,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            optimizer=optimizer,
        )

    @pytest.fixture
    def open_trainer(
        self,
        provider: Provider,
        config: Any,
        trainer_context: TrainerContext,
        loss: LossSpec,
        tolerance: float,
        reference: Reference,
    ) -> OpenTrainer:
        """Opens a fresh trainer; only one is open at a time."""

        @contextmanager
        def opened(**changes: Any) -> Iterator[TrainerUnderTest]:
            entry = entry_of("trainer", provider, trainer_context.rank_info.device)
            handle = build_trainer(entry, evolve(trainer_context, **changes), config)
            try:
                yield TrainerUnderTest(handle=handle, provider=provider, loss=loss, tolerance=tolerance, reference=reference)
            finally:
                handle.close()

        return opened

    @pytest.fixture
    def trainer(self, open_trainer: OpenTrainer) -> Iterator[TrainerUnderTest]:
        """A fresh trainer."""
        with open_trainer() as opened:
            yield opened

    @pytest.fixture
    def batch(self, reference: Reference) -> TokenBatch:
        """An optimizer step's sequences."""
        return make_batch(reference.vocab_size, seed=1)

    @pytest.fixture
    def baseline_run(
        self,
        provider: Provider,
        config: Any,
        trainer_context: TrainerContext,
        open_trainer: OpenTrainer,
        loss: LossSpec,
        reference: Reference,
        batch: TokenBatch,
    ) -> BaselineRun:
        """Three updates of a trainer to which nothing else happens, made once for a class's checks."""
        given = type(self), provider, config, trainer_context, loss, batch.tokens.tobytes(), batch.loss_mask.tobytes()
        if (key := repr(given)) not in _KEPT:
            other = make_batch(reference.vocab_size, seed=3)
            with open_trainer() as trainer:
                before = trainer.weights()
                steps = trainer.outcome((batch,), 0), trainer.outcome((other,), 1), trainer.outcome((batch, other), 2)
            _KEPT.clear()
            _KEPT[key] = BaselineRun(batch=batch, other=other, before=before, steps=steps)
        return _KEPT[key]


def assert_resumes(
    trainer: TrainerUnderTest,
    reopen: Callable[[], AbstractContextManager[TrainerUnderTest]],
    batch: TokenBatch,
    directory: Path,
) -> None:
    """Assert that a trainer opened anew continues from a saved state with the step that would have followed."""
    trainer.step((batch,))
    before = trainer.weights(1)
    trainer.save(directory)
    followed = trainer.outcome((batch,), 1)
    trainer.handle.close()
    with reopen() as resumed:
        resumed.load(directory)
        assert_same_step(resumed.outcome((batch,), 1), followed, before)


def expected_loss(
    policy: ReferencePolicy, batch: TokenBatch, loss: LossSpec, temperature: float = 1.0
) -> tuple[float, dict[str, float]]:
    """Loss and metrics of the probe loss by the reference, for a whole step in one batch."""
    assert isinstance(loss.config, ProbeConfig)
    logprobs, entropy = reference_logprobs(policy, batch, temperature)
    previous = loss.previous_of(batch.token_columns, logprobs)
    return expected_probe(batch, logprobs, None if loss.entropy == "none" else entropy, loss.config, previous)


def with_loss(
    loss: LossSpec,
    *,
    entropy: Literal["none", "metric", "loss"] | None = None,
    poison_gradient: bool = False,
    neighbours: bool = False,
    previous_logprobs: Literal["unchanged", "given", "absent"] | None = None,
) -> LossSpec:
    """The probe loss, changed; with log-probabilities at the start of the step as declared, and their column named."""
    assert isinstance(loss.config, ProbeConfig)
    changed = evolve(
        loss,
        config=evolve(loss.config, poison_gradient=poison_gradient, neighbours=neighbours),
        entropy=loss.entropy if entropy is None else entropy,
    )
    if previous_logprobs is None:
        return changed
    return evolve(changed, previous_logprobs=previous_logprobs, token_columns=(*loss.token_columns, PREVIOUS_LOGPROBS))
