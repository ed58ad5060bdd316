"""The session: sampling, gradients, updates, and the weights' way from trainer to generator."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from rlcore.run.execution.context import execution
from rlcore.run.execution.weight_sync import GeneratorSync, weight_sync_of
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.plan.channel import separate
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import nothing
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import GlobalCounts, LossSpec, Problem, TokenBatch, Tokenizer, WorkerError, capabilities
from rlcore.spi.arrays import Float32Array
from rlcore.spi.execution import Backends
from rlcore_session.batches import Limits, data_batch, require_counts, tokens_batch
from rlcore_session.errors import CallError, closed_session
from rlcore_session.losses import Derivatives
from rlcore_session.plan import Notes
from rlcore_session.prompts import Requests, SampleOptions
from rlcore_session.records import Completion, Datum, Gradients, Update
from rlcore_session.sampler import SampleCall, Sampler
from rlcore_session.storage import Storage
from rlcore_session.threads import CallThread
from rlcore_session.training import Piece, Training

if TYPE_CHECKING:
    from rlcore_session.asynchronous import AsyncSession

ResultT = TypeVar("ResultT")


class Session:
    """A model that samples and trains. `rlcore.open` makes it; it is a context manager.

    Every call waits for its result; `asynchronous` has the same calls as coroutines. One thread executes the calls of the
    trainer in their order. Samples are generated beside them where trainer and generator have devices of their own; else they
    take turns. Calls may come from several threads.
    """

    def __init__(self, plan: RunPlan, tokenizer: Tokenizer, vocab_size: int | None) -> None:
        """Start trainer and generator, and bring the generator to the trainer's weights, version 0."""
        self.plan = plan
        """The checked recipe with its plugins."""
        self.tokenizer = tokenizer
        """The model's tokenizer."""
        self._limits = Limits(max_sequence_length=plan.recipe.rollout.max_sequence_length, vocab_size=vocab_size)
        self._numbers = count()
        self._synced = {"": 0}
        """Training.incarnation of each adapter that was brought to the generator, by its name there."""
        self._closed = False
        self._lost: WorkerError | None = None
        self._stack = ExitStack()
        self._trainer_thread = CallThread("rlcore trainer")
        self._generator_thread = CallThread("rlcore generator") if separate(plan.recipe) else self._trainer_thread
        try:
            self._trainer_thread.run(self._start)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        plan, notes = self.plan, Notes()
        opened = self._stack.enter_context(execution(plan, self.tokenizer, None, notes))
        backends: Backends = self._stack.enter_context(opened())
        assert backends.generator is not None, "the plan of a session has a generator"
        weights = weight_sync_of(plan, backends, PhaseClock(notes), notes, InterruptGuard())
        assert isinstance(weights, GeneratorSync), "of a plan with a generator"
        # A generator that held the trainer's own tensors would change with each update, not with each sync.
        weights.refitter.may_alias = False
        self._weights, self._generator, self._backends = weights, backends.generator, backends
        self._training = Training(backends=backends, weights=weights, recipe=plan.recipe)
        self._storage = Storage(plan=plan, backends=backends, tokenizer=self.tokenizer)
        self._sampler = Sampler(backends.generator, weights.refitter)
        self._requests = Requests(
            recipe=plan.recipe,
            tokenizer=self.tokenizer,
            limits=self._limits,
            generator=backends.generator,
            adapters=(lambda: self.sampler_adapters) if self.holds_adapters else None,
        )
        weights.refit(0)

    @property
    def weight_version(self) -> int:
        """Return the version of the trainer's weights: updates since the model's beginning."""
        return self._training.version

    @property
    def sampler_version(self) -> int:
        """Return the version of the weights that `sample` uses: that of the last `sync`."""
        return self._sampler.version

    @property
    def holds_adapters(self) -> bool:
        """Return whether the generator holds adapters by their names, at most `refit.max_adapters`."""
        return self.plan.generator_lora is not None and self._generator.has(capabilities.MANY_ADAPTERS)

    @property
    def sampler_adapters(self) -> dict[str, int]:
        """Return the version of each adapter that the generator holds, by its name; those used longest ago come first."""
        held = self._weights.refitter.held if self.holds_adapters else {}
        return {name: version for name, version in held.items() if version >= 0}

    @property
    def asynchronous(self) -> "AsyncSession":
        """Return the same session, whose calls are coroutines."""
        from rlcore_session.asynchronous import AsyncSession

        return AsyncSession(self)

    def sample(
        self,
        prompts: Sequence[Any],
        *,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        adapter: str | None = None,
    ) -> list[list[Completion]]:
        """Sample completions of prompts: a list of `num_samples` for each.

        A prompt is a text, a chat (a list of messages), or a list of token ids. What is None is what [rollout] says. The same
        seed and weights give the same samples; without one the seeds follow from run.seed and the number of the call. `adapter`
        is one of `sampler_adapters`; None samples by the weights of the last `sync`.
        """
        call = self._add_call(
            prompts,
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
            adapter=adapter,
        )
        if self._generator_thread.is_current:
            self._generate(call.turn)
        return grouped(call.future.result(), num_samples)

    def begin_sampling(self, prompts: Sequence[Any], **options: Any) -> "Future[list[Completion]]":
        """Return the future of the samples of a call, those of a prompt adjacent. `options` are those of `sample`."""
        return self._add_call(prompts, **options).future

    def _add_call(self, prompts: Sequence[Any], **options: Any) -> SampleCall:
        self._require_open()
        chosen = SampleOptions(**options)
        call = SampleCall(self._requests.request(prompts, chosen, next(self._numbers)), adapter=chosen.adapter)
        self._sampler.add(call)
        # Bound to its turn: a job before a sync that answered calls behind it would keep the sync waiting.
        self._generator_thread.submit(partial(self._generate, call.turn))
        return call

    def logprobs(
        self, sequences: Sequence[Any], *, model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> list[Float32Array]:
        """Log-probabilities of the tokens of sequences, float32 [T] each, 0.0 at first tokens.

        `model` "reference" needs `rlcore.open(…, reference=True)`. Logits are divided by `temperature`.
        """
        self._require_open()
        if model not in ("policy", "reference"):
            raise CallError([Problem(path="model", found=repr(model), expected='"policy" or "reference"')])
        if model == "reference" and not self.plan.algorithm.needs.reference_logprobs:
            expected = "rlcore.open(…, reference=True)"
            raise CallError([Problem(path="model", found='"reference", in a session without one', expected=expected)])
        batch = tokens_batch(sequences, self._limits)
        return self._in_order(lambda: self._training.logprobs(batch, model, temperature))

    def forward_backward(
        self,
        data: Sequence[Datum] | TokenBatch,
        loss: str | LossSpec | Derivatives = "cross_entropy",
        *,
        config: Any = None,
        counts: GlobalCounts | None = None,
        temperature: float = 1.0,
    ) -> Gradients:
        """Compute the gradients of a loss and add them to those of earlier calls, until `optim_step` applies them.

        `loss` is a name, a path `package.module:function` of a loss as algorithms have, a LossSpec, or a function. The function
        gets the log-probabilities of each sequence, float32 [T], and returns its loss's derivatives by them. `config` has the
        options of a named loss, or the object that a path's function gets. The loss divides by `counts`; None counts the loss
        tokens and sequences of this call. Logits are divided by `temperature`. An error of the trainer drops all gradients. A
        CallError, and an error of the function itself, leave them.
        """
        self._require_open()
        piece = self._piece(data, loss, config=config, counts=counts, temperature=temperature)
        return self._in_order(lambda: self._training.forward_backward(piece))

    def forward_backward_together(self, pieces: Mapping[str, Mapping[str, Any]]) -> dict[str, Gradients]:
        """Compute `forward_backward` for each of several adapters, in passes that they share. `pieces` has its arguments by the
        adapter's name: {"one": {"data": data, "loss": "cispo"}}.

        The adapter in use stays in use. Losses are no functions of the driver. An error leaves the gradients of all as they
        were; with a trainer that lacks the capability `adapters_together` it drops those of these adapters.
        """
        self._require_open()
        checked = {name: self._piece(**arguments) for name, arguments in pieces.items()}
        return self._in_order(lambda: self._training.forward_backward_together(checked))

    def _piece(
        self,
        data: Sequence[Datum] | TokenBatch,
        loss: str | LossSpec | Derivatives = "cross_entropy",
        *,
        config: Any = None,
        counts: GlobalCounts | None = None,
        temperature: float = 1.0,
    ) -> Piece:
        batch = data_batch(data, self._limits)
        require_counts(counts)
        return Piece(batch=batch, loss=loss, config=config, counts=counts, temperature=temperature)

    def optim_step(
        self,
        *,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> Update:
        """Update the weights with the gradients held. What is None is what [optimizer] and [schedule] say.

        A gradient that is NaN or infinite raises NonFiniteError: the weights stay, and the gradients are dropped.
        """
        settings = {
            "learning_rate": learning_rate,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        return self._in_order(lambda: self._training.optim_step(settings))

    def record(self, directory: str | Path, *, weights: Literal["none", "model", "state"] = "model") -> None:
        """Write the next step to a new folder, a bundle, which `rlcore replay` computes again.

        The step is one `forward_backward` with a loss by name, and one `optim_step`, which writes the bundle. `weights` are
        those at the beginning of the step: none, the model, or the trainer's state with its optimizer too.
        """
        from rlcore_session.recording import StepRecording

        self._require_open()
        recording = StepRecording.of(directory, weights, self.plan, self._backends.trainer)
        self._in_order(lambda: self._training.record(recording))
        self._stack.callback(recording.discard)

    def drop_gradients(self) -> None:
        """Drop the gradients held, so that the next `forward_backward` begins a step."""
        self._in_order(self._training.drop_gradients)

    @property
    def has_adapters(self) -> bool:
        """Return whether `use_adapter` can change between adapters."""
        return self._training.has_adapters

    @property
    def computes_together(self) -> bool:
        """Return whether `forward_backward_together` shares passes, and an error of it leaves all gradients."""
        return self._training.computes_together

    @property
    def adapter(self) -> str:
        """Return the name of the adapter in use; "" is the one that the session opens with."""
        return self._training.adapter

    def use_adapter(self, name: str, *, seed: int | None = None, rank: int | None = None, drops: Sequence[str] = ()) -> int:
        """Change to another adapter on the same model, and return its version. `drops` are names of others to forget.

        A seed begins the adapter anew, at version 0; without one it goes on as it was left, with its gradients and moments.
        `rank` is that of an adapter that begins: 1 to lora.rank, the default. The generator keeps the weights of the last
        `sync`. Needs [lora].
        """
        return self._in_order(lambda: self._training.use_adapter(name, seed, rank, drops))

    def sync(self, name: str | None = None) -> int:
        """Bring the generator to the trainer's weights, proven by their digests, and return their version.

        A generator that `holds_adapters` gets the adapter in use by this name; None is the adapter's own. It keeps others, but
        for those used longest ago where there are more than `refit.max_adapters`. Other generators ignore the name.
        """
        return self._in_order(lambda: self._sync(name))

    def save(self, directory: str | Path) -> Path:
        """Write a checkpoint below a directory and return its path: weights, optimizer and version. Gradients are not in it.

        Of several adapters it holds the one in use; each has a directory of its own.
        """
        return self._in_order(lambda: self._storage.save(Path(directory), self._training.to_save(), self.adapter))

    def load(self, directory: str | Path, optimizer: bool = True, name: str | None = None) -> int:
        """Load a checkpoint of `save` or of a run, or the newest below a directory, sync, and return its version.

        With `optimizer` False the optimizer begins anew. `name` is that of `sync`.
        """
        return self._in_order(lambda: self._load(Path(directory), optimizer, name))

    def export(self, directory: str | Path, kind: Literal["hf", "peft"] = "hf") -> Path:
        """Write the model as a new directory in the Hugging Face format, or with "peft" its adapters in PEFT's."""
        return self._in_order(lambda: self._storage.export(Path(directory), kind, self._training.to_save))

    def close(self) -> None:
        """End trainer and generator behind the calls under way. A closed session takes no further calls."""
        if self._trainer_thread.is_closed:
            return
        self._closed = True
        if not self._takes_turns:
            self._trainer_thread.run(nothing)  # a sync under way needs the generator's thread
            self._generator_thread.close()
        try:
            self._trainer_thread.run(self._stack.close)
        finally:
            self._trainer_thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, call: Callable[[], ResultT]) -> "Future[ResultT]":
        """Return the future of a call in the trainer's thread."""
        self._require_open()
        future = self._trainer_thread.submit(call)
        if self._takes_turns:
            # Samples that come behind the call join no stream before it, which would then never end.
            self._sampler.end_turn()
        return future

    def _in_order(self, call: Callable[[], ResultT]) -> ResultT:
        """Return the result of a call in the trainer's thread, behind those that came before."""

        def watched() -> ResultT:
            with self._watched():
                return call()

        return watched() if self._trainer_thread.is_current else self.submit(watched).result()

    @property
    def _takes_turns(self) -> bool:
        """Return whether trainer and generator have one thread."""
        return self._generator_thread is self._trainer_thread

    def _sync(self, name: str | None = None) -> int:
        self._training.require_no_gradients("sync")
        version, incarnation, refitter = self._training.version, self._training.incarnation, self._weights.refitter
        given = (self.adapter if name is None else name) if self.holds_adapters else ""

        def refit() -> None:
            refitter.adapter = given
            if self._synced.get(given) != incarnation:  # whose versions count other weights
                refitter.forget(given)
            self._weights.refit(version)
            # Before the next stream of the generator's thread, which asks for this version.
            self._sampler.version = version
            self._synced = {one: self._synced.get(one, incarnation) for one in refitter.held} | {given: incarnation}

        # The generator's thread has no stream under way then; the trainer's waits meanwhile.
        self._generator_thread.run(refit, then=self._sampler.end_turn)
        return version

    def _load(self, directory: Path, optimizer: bool, name: str | None) -> int:
        self._training.begin_load()
        # A generator of several adapters keeps the others, which a state of its own would take away.
        self._training.version = self._storage.load(directory, optimizer=optimizer, generator=not self.holds_adapters)
        if not self.holds_adapters:
            self._weights.forget()
        return self._sync(name)

    def _generate(self, latest: int) -> None:
        """Answer the calls for samples that wait, up to a turn."""
        self._sampler.answer(latest, self._generating)

    def _generating(self, stream: Callable[[], None]) -> None:
        with self._watched():
            if not self._takes_turns:
                stream()
                return
            self._training.require_no_gradients("sample")
            self._weights.generating(stream, self._sampler.version, before_change=self._require_same_weights)

    def _require_same_weights(self) -> None:
        """CallError where the generator has lost weights that the trainer holds no more."""
        sampler, trainer = self._sampler.version, self._training.version
        is_same = self._synced.get(self._weights.refitter.adapter) == self._training.incarnation
        if sampler != trainer or not is_same:
            found = f"version {sampler} gone from the generator, and version {trainer} in the trainer"
            found += "" if is_same else f" of the adapter {self.adapter!r}"
            remedy = "Call sync() after optim_step. With offload.generator_sleep_mode = false the generator keeps its weights."
            raise CallError([Problem(path="sample", found=found, expected="the weights of the last sync", remedy=remedy)])

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A call of the backends. An error after which their state is not known is the session's end."""
        self._require_open()
        try:
            yield
        except BaseException as error:
            usable = self._training.is_usable and self._generator.is_usable
            if isinstance(error, WorkerError) or not usable:
                lost = (
                    f"The session is lost with it: weights of version {self._training.version}, the optimizer's state"
                    f"{self._training.gradients_text}. {self._storage.last_saved_text} Close it, and open another"
                )
                error.add_note(lost)
                self._lost = WorkerError(f"the session is lost, by {type(error).__name__}: {error}\n{lost}")
            raise

    def _require_open(self) -> None:
        """Raise where the session takes no calls. In its own threads those that came before its end go on."""
        if self._lost is not None:
            raise WorkerError(str(self._lost))
        if self._closed and not (self._trainer_thread.is_current or self._generator_thread.is_current):
            raise closed_session()


def grouped(completions: Sequence[Completion], size: int) -> list[list[Completion]]:
    """Return the samples of each prompt, `size` each."""
    return [list(completions[start : start + size]) for start in range(0, len(completions), size)]
