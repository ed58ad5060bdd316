"""The trainer of a session: gradients, updates and log-probabilities. The session calls it from one thread."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from attrs import define, evolve, field, frozen

from rlcore.config.recipe import Recipe
from rlcore.run.execution.weight_sync import GeneratorSync
from rlcore.run.train_step.scorers import Reference
from rlcore.spi import (
    ForwardBackwardRequest,
    GlobalCounts,
    LoraSpec,
    LossSpec,
    OptimStepRequest,
    Problem,
    TokenBatch,
    UseAdapterRequest,
    capabilities,
)
from rlcore.spi.arrays import AnyArray, Float32Array
from rlcore.spi.execution import Backends, Minibatch, TrainerGroup
from rlcore_session.arguments import adapter_problems, is_number, rank_problems, setting_problems
from rlcore_session.batches import split
from rlcore_session.errors import CallError, require_none
from rlcore_session.loss_functions import DERIVATIVES
from rlcore_session.losses import LINEAR, Derivatives, Losses
from rlcore_session.prompts import LEAST_TEMPERATURE
from rlcore_session.records import Gradients, Update

if TYPE_CHECKING:
    from rlcore_session.recording import StepRecording

CALLS = "one forward_backward and one optim_step"
"""The calls of a step that a bundle holds."""


@frozen(kw_only=True)
class ParkedAdapter:
    """The counts of an adapter that is not in use."""

    version: int
    pieces: int
    dropped: str
    incarnation: int


@frozen(kw_only=True, eq=False)
class Piece:
    """The data of a call of forward_backward, checked and packed, and its other arguments."""

    batch: TokenBatch
    loss: str | LossSpec | Derivatives
    config: Any
    counts: GlobalCounts | None
    temperature: float

    def minibatch(self, version: int) -> Minibatch:
        """Return all sequences of the piece."""
        counts = self.counts or self.batch.counts()
        return Minibatch(batch=self.batch, sequences=_every(self.batch), counts=counts, schedule_step=version)


@define(kw_only=True, eq=False)
class Training:
    """Counts versions and the calls whose gradients the trainer holds."""

    backends: Backends
    weights: GeneratorSync
    recipe: Recipe
    version: int = 0
    """Version of the trainer's weights."""
    pieces: int = 0
    """Calls of forward_backward whose gradients the trainer holds."""
    dropped: str = ""
    """The cause, where gradients were dropped since the last update."""
    adapter: str = ""
    """The name of the adapter in use."""
    num_begun: int = 0
    """The number of adapters that were begun, each time anew, and of states that were loaded."""
    parked: dict[str, ParkedAdapter] = field(factory=dict)
    """Adapters that are not in use."""
    recording: "StepRecording | None" = None
    """The bundle that the next step is written to."""
    incarnation: int = 0
    """`num_begun` when the adapter in use was begun or loaded: one that is begun anew is another one."""

    @property
    def is_usable(self) -> bool:
        """Return whether the trainer is in a known state."""
        return self.backends.trainer.is_usable

    @property
    def gradients_text(self) -> str:
        """Return the words on the gradients held, for messages; "" where there are none."""
        return f" and the gradients of {self.pieces} call(s)" if self.pieces else ""

    def require_no_gradients(self, call: str, *, parked_alone: bool = False) -> None:
        """CallError where the memory of a shared device is to move, and gradients with it; those of all adapters, or of those
        that are not in use."""
        held = {name: one.pieces for name, one in self.parked.items() if one.pieces}
        if self.pieces and not parked_alone:
            held[self.adapter] = self.pieces
        if held and self.weights.residency.moves:
            of = "" if held.keys() <= {self.adapter} else f" of the adapter(s) {', '.join(map(repr, held))}"
            found = (
                f"the gradients of {sum(held.values())} call(s){of}, which leave the device that trainer and generator share"
            )
            remedy = "Call optim_step first, or give the generator devices of its own."
            raise CallError([Problem(path=call, found=found, expected="no gradients", remedy=remedy)])

    def logprobs(self, batch: TokenBatch, model: Literal["policy", "reference"], temperature: float) -> list[Float32Array]:
        """float32 [T] of each sequence, 0.0 at first tokens."""
        trainer = self._trainer(temperature)
        if model == "policy":
            return split(trainer.logprobs(batch, _every(batch), "policy", self.version), batch)
        reference = Reference.of(self.backends)
        group = trainer if not reference.is_apart else reference.group.at_temperature(temperature)
        return split(evolve(reference, group=group).of_batch(batch, self.version), batch)

    def forward_backward(self, piece: Piece) -> Gradients:
        """Add the gradients of a loss."""
        trainer, batch, loss = self._trainer(piece.temperature), piece.batch, piece.loss
        if (recording := self.recording) is not None:
            recording.require(loss, self.pieces)
        if isinstance(loss, str | LossSpec) or not callable(loss):
            spec = Losses(recipe=self.recipe, trainer=trainer).spec(loss, piece.config, batch)
        else:
            if piece.config is not None:
                given_config = f"{piece.config!r:.80}"
                raise CallError([Problem(path="config", found=given_config, expected="None: the loss is a function")])
            with self._dropping():
                current = trainer.logprobs(batch, _every(batch), "policy", self.version)
            given = loss(split(current, batch))
            self.weights.to_training()  # the function may have sampled
            spec, batch = LINEAR, batch.with_token_column(DERIVATIVES, derivatives_of(given, batch))
        minibatch = evolve(piece, batch=batch).minibatch(self.version)
        returns = trainer.has(capabilities.STEP_LOGPROBS)
        if recording is not None:
            recording.begin()
        with self._dropping():
            own = None if returns else trainer.logprobs(batch, _every(batch), "policy", self.version)
            result, logprobs = trainer.forward_backward(minibatch, spec, self.version, piece=self.pieces, logprobs=returns)
        self.pieces += 1
        found = own if logprobs is None else logprobs
        assert found is not None, "the trainer returned them, or was asked before"
        if recording is not None:
            recording.note(minibatch, spec, result, found, piece.temperature)
        return Gradients(loss=result.loss, metrics=dict(result.metrics), logprobs=split(found, batch))

    def forward_backward_together(self, pieces: Mapping[str, Piece]) -> dict[str, Gradients]:
        """Add the gradients of a piece to those of each of several adapters."""
        self._require_pieces(pieces)
        if not self.backends.trainer.has(capabilities.STEP_LOGPROBS):
            return self._by_turns(pieces)
        requests = {}
        for name, piece in pieces.items():
            own, trainer, loss = self._counts(name), self._trainer(piece.temperature), piece.loss
            assert not callable(loss), "as was checked"
            spec = Losses(recipe=self.recipe, trainer=trainer).spec(loss, piece.config, piece.batch)
            request = ForwardBackwardRequest(
                microbatches=(),
                counts=piece.counts or piece.batch.counts(),
                loss=spec,
                temperature=float(piece.temperature),
                weight_version=own.version,
                piece=own.pieces,
            )
            requests[name] = request, piece.minibatch(own.version)
        try:
            found = self.backends.trainer.forward_backward_together(requests)
        except BaseException as error:
            if not self.computes_together:
                self._drop(pieces, error)
            raise
        for name in pieces:
            self._note(name, pieces=self._counts(name).pieces + 1)
        return {
            name: Gradients(loss=result.loss, metrics=dict(result.metrics), logprobs=split(logprobs, pieces[name].batch))
            for name, (result, logprobs) in found.items()
            if logprobs is not None
        }

    def _by_turns(self, pieces: Mapping[str, Piece]) -> dict[str, Gradients]:
        """Go through the adapters of a trainer that returns no log-probabilities with gradients."""
        used, found = self.adapter, {}
        try:
            for name, piece in pieces.items():
                self.use_adapter(name, None, None, ())
                found[name] = self.forward_backward(piece)
        except BaseException as error:
            self._drop(pieces, error)
            raise
        finally:
            if self.is_usable:
                self.use_adapter(used, None, None, ())
        return found

    def _counts(self, adapter: str) -> ParkedAdapter:
        """Return the counts of an adapter, also of the one in use."""
        if adapter != self.adapter:
            return self.parked[adapter]
        return ParkedAdapter(version=self.version, pieces=self.pieces, dropped=self.dropped, incarnation=self.incarnation)

    def _note(self, adapter: str, *, pieces: int, dropped: str = "") -> None:
        if adapter == self.adapter:
            self.pieces, self.dropped = pieces, dropped
        else:
            self.parked[adapter] = evolve(self.parked[adapter], pieces=pieces, dropped=dropped)

    def _drop(self, adapters: Collection[str], error: BaseException) -> None:
        """Note that an error of a call dropped the gradients of these adapters."""
        for name in adapters:
            count = self._counts(name).pieces or 1
            self._note(name, pieces=0, dropped=f", since {type(error).__name__} dropped those of {count} call(s)")

    def _require_pieces(self, pieces: Mapping[str, Piece]) -> None:
        call = "forward_backward_together"
        self._require_unrecorded(call)
        self._require_many(call)
        known = {self.adapter, *self.parked}
        if not pieces or pieces.keys() - known:
            found, expected = ", ".join(map(repr, pieces)) or "no adapter", f"some of {', '.join(sorted(map(repr, known)))}"
            raise CallError([Problem(path=call, found=found, expected=expected, remedy="A seed of use_adapter begins one.")])
        require_none(
            Problem(
                path=f"{call}[{name!r}].loss",
                found="a function",
                expected="a name, a path or a LossSpec",
                remedy="forward_backward takes functions",
            )
            for name, piece in pieces.items()
            if callable(piece.loss)
        )

    def optim_step(self, settings: Mapping[str, Any]) -> Update:
        """Apply the gradients held."""
        problems = list(setting_problems(settings))
        if not self.pieces:
            found = f"no gradients{self.dropped}"
            problems.append(Problem(path="optim_step", found=found, expected="those of forward_backward calls before it"))
        require_none(problems)
        given: dict[str, Any] = {
            name: float(value) for name, value in settings.items() if value is not None and name != "betas"
        }
        if (betas := settings["betas"]) is not None:
            given["betas"] = float(betas[0]), float(betas[1])
        trainer, recording = self.backends.trainer, self.recording
        if recording is not None and trainer.has(capabilities.GRADIENT_NORMS):
            given["gradient_norms"] = True
        with self._dropping():
            request = OptimStepRequest(pieces=self.pieces, weight_version=self.version, **given)
            result = trainer.optim_step(request)
        self.version, self.pieces, self.dropped, self.recording = result.weight_version, 0, "", None
        if recording is not None:
            recording.write(request, result)
        return Update(
            weight_version=result.weight_version,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            metrics=dict(result.metrics),
        )

    def drop_gradients(self) -> None:
        """Forget the gradients held: the trainer drops them as the next piece begins a step."""
        self.pieces = 0

    def use_adapter(self, name: str, seed: int | None, rank: int | None, drops: Sequence[str]) -> int:
        """Change to another adapter, and return its version."""
        self._require_unrecorded("use_adapter")
        self._require_adapters(name, seed, rank, drops)
        self.weights.to_training()
        seed, rank = (None if number is None else int(number) for number in (seed, rank))
        request = UseAdapterRequest(name=name, seed=seed, rank=rank, drops=tuple(dict.fromkeys(drops)))
        result = self.backends.trainer.use_adapter(request)
        self.parked[self.adapter] = ParkedAdapter(
            version=self.version, pieces=self.pieces, dropped=self.dropped, incarnation=self.incarnation
        )
        self.adapter = name
        if seed is None:
            parked = self.parked[name]
            self.pieces, self.dropped, self.incarnation = parked.pieces, parked.dropped, parked.incarnation
        else:
            self.num_begun += 1
            self.pieces, self.dropped, self.incarnation = 0, "", self.num_begun
        for one in (name, *drops):
            self.parked.pop(one, None)
        self.version = result.weight_version
        return self.version

    @property
    def has_adapters(self) -> bool:
        """Return whether the trainer changes between adapters."""
        return self.recipe.lora is not None and self.backends.trainer.has(capabilities.MANY_ADAPTERS)

    @property
    def computes_together(self) -> bool:
        """Return whether pieces of several adapters share the trainer's passes, and a failure leaves all gradients."""
        return self.has_adapters and self.backends.trainer.has(capabilities.ADAPTERS_TOGETHER)

    def _require_many(self, call: str) -> LoraSpec:
        lora = self.recipe.lora
        if lora is None or not self.has_adapters:
            found = "a recipe without [lora]" if lora is None else "a trainer that keeps one adapter"
            expected = "[lora], and a trainer with the capability many_adapters"
            raise CallError([Problem(path=call, found=found, expected=expected)])
        return lora

    def _require_adapters(self, name: str, seed: int | None, rank: int | None, drops: Sequence[str]) -> None:
        lora = self._require_many("use_adapter")
        require_none([*adapter_problems(name, seed, drops), *rank_problems(seed, rank, lora)])
        known = {self.adapter, *self.parked}
        unknown = [one for one in (*drops, *([name] if seed is None else [])) if one not in known or name in drops]
        if unknown:
            found = f"{unknown[0]!r:.80}, which is in use or was never begun"
            expected = f"one of {', '.join(sorted(map(repr, known)))}"
            raise CallError([Problem(path="use_adapter", found=found, expected=expected, remedy="A seed begins an adapter.")])

    def record(self, recording: "StepRecording") -> None:
        """Write the next step to a bundle."""
        found = f"the gradients of {self.pieces} call(s)" if self.pieces else ""
        if not found and (self.adapter or self.parked):
            found = f"a session of {1 + len(self.parked)} adapters"
        if not found and self.recipe.lora is not None and self.recipe.lora.dropout:
            found = f"lora.dropout = {self.recipe.lora.dropout}, whose masks differ between trainers and dtypes"
        if found:
            expected = "no gradients, one adapter, no dropout"
            remedy = "Call it before the step, in a session without use_adapter and lora.dropout."
            raise CallError([Problem(path="record", found=found, expected=expected, remedy=remedy)])
        self.recording = recording

    def _require_unrecorded(self, call: str) -> None:
        if self.recording is not None:
            found, remedy = f"a call of a step that {self.recording.directory} is to hold", "Make the step of `record` first."
            raise CallError([Problem(path=call, found=found, expected=CALLS, remedy=remedy)])

    def to_save(self) -> int:
        """Move the trainer to where it can be saved, and return its version."""
        self.weights.make_room_to_save()
        return self.version

    def begin_load(self) -> None:
        """Move the trainer to where a state can be loaded, and drop gradients of the adapter in use."""
        self.require_no_gradients("load", parked_alone=True)  # the sync behind it moves them
        self.weights.to_training()
        self.num_begun += 1
        self.incarnation = self.num_begun
        if self.pieces:
            self.dropped = f", since load dropped those of {self.pieces} call(s)"
        self.pieces = 0

    def _trainer(self, temperature: float) -> TrainerGroup:
        """The trainer on its device, at a temperature."""
        if not is_number(temperature) or not LEAST_TEMPERATURE <= temperature < np.inf:
            expected = f"a number of at least {LEAST_TEMPERATURE:g}"
            raise CallError([Problem(path="temperature", found=repr(temperature), expected=expected)])
        self.weights.to_training()
        return self.backends.trainer.at_temperature(float(temperature))

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """A call of the trainer, whose error drops the gradients held."""
        try:
            yield
        except BaseException as error:
            self.pieces, self.dropped = 0, f", since {type(error).__name__} dropped those of {self.pieces or 1} call(s)"
            raise


def derivatives_of(given: Any, batch: TokenBatch) -> Float32Array:
    """float32 [T]: what a caller's loss returned, checked against the batch."""
    lengths = batch.lengths.tolist()
    parts = [np.asarray(_on_host(part), np.float64) for part in given] if isinstance(given, list | tuple) else None
    if parts is None or [part.shape for part in parts] != [(length,) for length in lengths]:
        found = f"a {type(given).__name__}" if parts is None else f"arrays {[list(part.shape) for part in parts]!r:.80}"
        raise CallError([Problem(path="loss", found=f"{found} returned", expected=f"a list of arrays {lengths!r:.80}")])
    flat = np.concatenate(parts)
    problems = []
    if not np.isfinite(flat).all():
        found = f"the derivative {flat[~np.isfinite(flat)][0]} returned"
        problems.append(Problem(path="loss", found=found, expected="finite numbers"))
    elif flat[~batch.loss_mask].any():
        found = "a derivative returned for a token whose loss_mask is False"
        problems.append(Problem(path="loss", found=found, expected="0.0 there, or the token in the loss_mask"))
    require_none(problems)
    return flat.astype(np.float32)


def _on_host(part: Any) -> Any:
    """An array, from a tensor too."""
    return part.detach().cpu().numpy() if hasattr(part, "detach") else part


def _every(batch: TokenBatch) -> AnyArray:
    return np.arange(batch.num_sequences)
