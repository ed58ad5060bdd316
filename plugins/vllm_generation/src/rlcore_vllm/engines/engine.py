"""One vLLM engine in a thread of its own, which alone touches it; other threads hand it commands, carried out between steps."""

import atexit
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, TypeVar

from rlcore.spi import ContractError, DraftCounts, RlcoreError, WorkerError
from rlcore_torchkit.generation import FinishedSample
from rlcore_vllm.engines import residency, versions
from rlcore_vllm.engines.draft_counter import DraftCounter
from rlcore_vllm.engines.engine_metrics import EngineMetrics
from rlcore_vllm.engines.environment import RunningEngine
from rlcore_vllm.engines.explain import explain
from rlcore_vllm.engines.grammars import start_grammars
from rlcore_vllm.engines.image_features import image_features
from rlcore_vllm.engines.rank_recorders import Logprobs, Masks, RankCalls
from rlcore_vllm.engines.recorder import RecordedRequest
from rlcore_vllm.engines.sampling import (
    TOKENS_ALONE,
    OnTokens,
    SampledTokens,
    Samples,
    engine_sampling,
    engine_seeds,
    finish_reason,
    logprob_rows,
)
from rlcore_vllm.engines.sampling_masks import truncates
from rlcore_vllm.engines.unfinished import Deliver, Job, Sample, settle
from rlcore_vllm.setup.settings import EngineSettings

Result = TypeVar("Result")
RECORDER_STEPS = 16
"""Samples that ended are handed out at every so many steps where that needs to wait for the device."""


class Engine:
    """A vLLM engine that any thread may use. It holds no weights that count until `end_update` says which."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start; returns once the engine is ready. What vLLM raises passes through."""
        self._settings = settings
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while a command is put in, so that none comes after the last was taken out."""
        self._is_over = False
        self._samples: dict[str, Sample] = {}
        """Samples in the making, by the name of their request."""
        self._ended: dict[str, Sample] = {}
        """Samples that have ended and are not handed out yet, by the name of their request."""
        self._rank_calls: RankCalls | None = None
        self._recorder: Logprobs | None = None
        self._masks: Masks | None = None
        self._draft_counter: DraftCounter | None = None
        self._metrics: EngineMetrics | None = None
        self._num_steps = 0
        self._num_requests = 0
        self._versions: Mapping[int, int] = {}
        """The version of each adapter, by its number; NO_ADAPTER is the model without any."""
        self._paused = False
        self._closing = False
        self._failure: str | None = None
        self._load_tokenizer = cache(settings.load_tokenizer)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="rlcore-vllm-engine", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._thread.join()
            raise
        # vLLM's own threads abort the process where they still run when it ends.
        atexit.register(self.close)

    def generate(self, samples: Samples, deliver: Deliver, on_tokens: OnTokens | None = None) -> Future[None]:
        """Sample; `deliver` is called in the engine's thread with those that ended in one step, and `on_tokens` with new tokens
        of samples that are read meanwhile. Both must be quick.

        Cancelling the future drops the samples that have not ended.
        """
        job = Job(deliver, len(samples.numbers), on_tokens)
        if not job.num_left:
            job.done.set_result(None)
            return job.done
        self._submit(lambda: self._add(samples, job)).add_done_callback(lambda added: _forward_failure(added, job.done))
        job.done.add_done_callback(lambda done: self._submit(lambda: self._cancel(job)) if done.cancelled() else None)
        return job.done

    def cut(self, calls: Sequence[Future[None]], number: int | None = None) -> None:
        """Hand out what has not ended of `generate` calls, as ABORTED with the tokens that it has; the calls then end. With
        `number`, only the sample of that number."""

        def forward_failure(cut: Future[None]) -> None:
            for call in calls:
                _forward_failure(cut, call)

        self._submit(lambda: self._cut(calls, number)).add_done_callback(forward_failure)

    def begin_update(self) -> Future[None]:
        """Pause: no token is sampled until end_update. What the device was given before is read first."""
        return self._submit(self._pause)

    def call_workers(self, method: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> Future[list[Any]]:
        """vLLM's collective_rpc: one result a rank. Without queued batches only: paused, or before anything runs."""
        return self._submit(lambda: self._llm.collective_rpc(method, kwargs=dict(kwargs)))

    def end_update(self, versions: Mapping[int, int]) -> Future[DraftCounts | None]:
        """Drop all that was computed under the old weights and go on; later tokens carry the version of their adapter, by its
        number. Samples of other adapters end as ABORTED. What was guessed since the update before, None where no tokens are
        guessed."""
        return self._submit(lambda: self._resume(versions))

    def set_residency(self, *, weights: bool, cache: bool, discard_weights: bool) -> Future[int]:
        """Return whether weights and KV cache are on the device; returns the bytes that are. Nothing may be generating."""
        return self._submit(lambda: self._move(weights, cache, discard_weights))

    def close(self) -> None:
        """Stop and free everything; samples in the making fail. May be called again."""

        def stop() -> None:
            self._closing = True

        atexit.unregister(self.close)
        self._submit(stop)
        self._thread.join()

    # The engine's thread.

    def _run(self, ready: Future[None]) -> None:
        try:
            self._running = RunningEngine(self._settings)
            self._llm = self._running.llm
            self._core = self._llm.engine_core.engine_core
            self._rank_calls = versions.rank_calls(self._llm)
            self._recorder = versions.logprob_recorder(self._llm, self._rank_calls)
            self._masks = versions.mask_recorder(self._llm, self._rank_calls)
            self._draft_counter = versions.draft_counter(self._core)
            if self._settings.metrics_file is not None:
                self._metrics = EngineMetrics(self._llm, self._settings.metrics_file)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            self._loop()
        except BaseException:
            self._failure = _failure()
        finally:
            self._shut_down()

    def _loop(self) -> None:
        while not self._closing:
            has_work = versions.has_work(self._core)
            if self._metrics is not None and not has_work:
                self._metrics.rest()
            self._carry_out(block=self._paused or not has_work)
            if not self._paused and versions.has_work(self._core):
                self._step()

    def _carry_out(self, block: bool) -> None:
        """The commands that wait; with `block`, at least one."""
        while block or not self._commands.empty():
            command, future = self._commands.get()
            block = False
            try:
                future.set_result(command())
            except RlcoreError as error:
                future.set_exception(error)
            except BaseException as error:
                settle(future, WorkerError(_failure()))
                if not isinstance(error, Exception):  # such as a panic in a native library, which ends the engine
                    raise

    def _submit(self, command: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            if self._is_over:
                future.set_exception(self._error())
            else:
                self._commands.put((command, future))
        return future

    def _add(self, samples: Samples, job: Job) -> None:
        version = self._versions.get(samples.adapter)
        if version is None:  # its adapter was dropped while it was on its way
            job.hand_out([Sample(job, number, 0, 0, -1).finish() for number in samples.numbers.tolist()])
            return
        prompts = [samples.prompts.sequence(index).tolist() for index in range(samples.prompts.num_sequences)]
        seeds = engine_seeds(samples.seeds)
        images = samples.images or ((),) * len(prompts)
        try:
            if samples.sampling.json_schema is not None:
                start_grammars(self._core, self._load_tokenizer, samples.sampling.stop_token_ids)
            features = [
                image_features(self._llm, f"{self._num_requests}-{index}", prompt, files) if files else None
                for index, (prompt, files) in enumerate(zip(prompts, images, strict=True))
            ]
            for index, number in enumerate(samples.numbers.tolist()):
                limit = int(samples.limits[index])
                prompt = prompts[samples.prompt_of[index]]
                read = None if samples.read is None else samples.read[index]
                least = None if self._recorder is not None and read in (None, TOKENS_ALONE) else 0
                logprobs = least if read is None else max(read, 0) if least == 0 else None
                of_prompt = max(read or 0, 0) if samples.reads_prompt is not None and samples.reads_prompt[index] else None
                params = engine_sampling(samples.sampling, seeds[index], limit, logprobs=logprobs, prompt_logprobs=of_prompt)
                request = versions.make_request(
                    str(self._num_requests),
                    prompt,
                    params,
                    adapter=samples.adapter,
                    features=features[samples.prompt_of[index]],
                )
                self._num_requests += 1
                sample = Sample(job, number, len(prompt), limit, version, samples.adapter)
                sample.read = read
                if samples.sampling.stop_strings:
                    sample.detokenizer = versions.make_detokenizer(self._load_tokenizer(), params)
                if samples.routed_experts:
                    sample.routed = []
                if samples.sampling_mask and self._masks is not None and truncates(samples.sampling):
                    sample.is_masked = True
                    self._masks.expect(request.request_id)
                self._samples[request.request_id] = sample
                if self._recorder is not None:
                    self._recorder.expect(request.request_id, len(prompt) + limit)
                if self._metrics is not None:
                    name = request.lora_request.lora_name if request.lora_request is not None else None
                    self._metrics.begin(request.request_id, len(prompt), limit, name)
                self._llm.engine_core.add_request(request)
        except BaseException:
            self._cancel(job)
            raise

    def _step(self) -> None:
        """One step of vLLM, and what it sampled. Without a recorder, this is where log-probabilities are read off."""
        stopped: list[str] = []
        self._num_steps += 1
        if self._rank_calls is not None:
            self._rank_calls.tell()
        outputs = self._llm.engine_core.get_output()
        if self._metrics is not None:
            self._metrics.record(outputs)
        for output in outputs.outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                continue
            tokens, scored = output.new_token_ids, output.new_prompt_logprobs_tensors
            if scored is not None and sample.job.on_tokens is not None:
                rows = logprob_rows(scored.logprob_token_ids, scored.logprobs, 1 + (sample.read or 0))
                sample.job.on_tokens(SampledTokens(number=sample.number, first=0, tokens=(), logprobs=rows, is_prompt=True))
            if sample.routed is not None and output.routed_experts is not None:
                sample.routed.append(output.routed_experts)
            reason = None if output.finish_reason is None else str(output.finish_reason)
            if sample.detokenizer is not None:
                length = _completing(sample.detokenizer, tokens)
                if length is not None:
                    if reason is None:
                        stopped.append(output.request_id)
                    tokens, reason = tokens[:length], "stop"
            if tokens:
                if sample.read is not None and sample.job.on_tokens is not None:
                    sample.job.on_tokens(_sampled(sample, tokens, output.new_logprobs))
                sample.tokens += tokens
                if output.new_logprobs is not None:
                    sample.logprobs += output.new_logprobs.logprobs[: len(tokens), 0].tolist()
            if reason is not None:
                del self._samples[output.request_id]
                sample.reason = finish_reason(reason, len(sample.tokens), sample.limit)
                self._ended[output.request_id] = sample
        self._abort(stopped)
        if self._ended and self._is_worth_a_wait(self._recorder):
            self._hand_out()

    def _is_worth_a_wait(self, recorder: Logprobs | None) -> bool:
        """Return whether to hand out what has ended now, for which a recorder waits for the device."""
        if recorder is None or not self._samples or self._num_steps % RECORDER_STEPS == 0:
            return True
        return len(self._ended) >= recorder.most_ended

    def _hand_out(self) -> None:
        """Deliver the samples that have ended, with what the recorder holds of them."""
        asked = [
            RecordedRequest(request=request, prompt_length=sample.prompt_length, num_tokens=len(sample.tokens))
            for request, sample in self._ended.items()
        ]
        if self._recorder is not None:
            for one, logprobs in zip(asked, self._recorder.fetch(asked), strict=True):
                self._ended[one.request].logprobs = logprobs
        if self._masks is not None:
            masked = [one for one in asked if self._ended[one.request].is_masked]
            for one, mask in zip(masked, self._masks.fetch(masked), strict=True):
                self._ended[one.request].mask = mask
        jobs: dict[int, tuple[Job, list[FinishedSample]]] = {}
        for sample in self._ended.values():
            jobs.setdefault(id(sample.job), (sample.job, []))[1].append(sample.finish())
        # Not before: where the device fails, what has ended fails with the engine instead of never coming.
        self._ended = {}
        for job, finished in jobs.values():
            job.hand_out(finished)

    def _pause(self) -> None:
        self._paused = True
        versions.set_paused(self._core, True)
        while versions.has_work(self._core):
            self._step()
        if self._ended:
            self._hand_out()

    def _resume(self, new: Mapping[int, int]) -> DraftCounts | None:
        gone = {request: sample for request, sample in self._samples.items() if sample.adapter not in new}
        if gone:
            self._samples = {request: sample for request, sample in self._samples.items() if request not in gone}
            self._ended |= gone
            self._hand_out()  # before vLLM forgets the requests, and the recorder with it
            self._abort(list(gone))
        versions.drop_caches(self._core)
        self._versions = new
        for sample in self._samples.values():
            sample.change_version(new[sample.adapter])
        versions.set_paused(self._core, False)
        self._paused = False
        return None if self._draft_counter is None else self._draft_counter.take()

    def _move(self, weights: bool, cache: bool, discard_weights: bool) -> int:
        if self._samples or self._ended:
            raise ContractError("set_residency: found samples in the making; expected none. Let generate return first")
        if self._recorder is not None and not cache:
            self._recorder.release()
        residency.move(self._llm, weights=weights, cache=cache, discard_weights=discard_weights)
        if self._recorder is not None and cache:
            self._recorder.reserve()
        measure = partial(residency.held_bytes, in_process=self._settings.in_process)
        # In a process of its own, what the recorder holds is measured with all else.
        recorded = self._recorder.device_bytes if self._recorder is not None and self._settings.in_process else 0
        return recorded + sum(self._llm.collective_rpc(measure))

    def _cut(self, calls: Sequence[Future[None]], number: int | None) -> None:
        ends = {id(call) for call in calls}
        known = [*self._samples.values(), *self._ended.values()]
        jobs = {id(sample.job): sample.job for sample in known if id(sample.job.done) in ends}
        cut = {
            request: sample
            for request, sample in self._samples.items()
            if id(sample.job) in jobs and number in (None, sample.number)
        }
        self._samples = {request: sample for request, sample in self._samples.items() if request not in cut}
        self._ended |= cut
        try:
            if self._ended:
                self._hand_out()  # before vLLM forgets the requests, and the recorder with it
        except BaseException:
            # The calls fail with this; what is left of them would come a second time.
            for job in jobs.values():
                self._cancel(job)
            raise
        finally:
            self._abort(list(cut))

    def _cancel(self, job: Job) -> None:
        requests = [request for request, sample in self._samples.items() if sample.job is job]
        for recorder in (self._recorder, self._masks):
            if recorder is not None:
                recorder.forget([*requests, *(request for request, sample in self._ended.items() if sample.job is job)])
        self._samples = {request: sample for request, sample in self._samples.items() if sample.job is not job}
        self._ended = {request: sample for request, sample in self._ended.items() if sample.job is not job}
        self._abort(requests)

    def _abort(self, requests: Sequence[str]) -> None:
        self._llm.engine_core.abort_requests(list(requests))
        if self._metrics is not None:
            self._metrics.forget(requests)

    def _shut_down(self) -> None:
        with self._lock:
            self._is_over = True
        while not self._commands.empty():
            settle(self._commands.get()[1], self._error())
        left = [*self._samples.values(), *self._ended.values()]
        for job in {id(sample.job): sample.job for sample in left}.values():
            settle(job.done, self._error())
        self._samples, self._ended = {}, {}
        if self._metrics is not None:
            self._metrics.close()
        del self._llm, self._core, self._rank_calls, self._recorder, self._masks, self._metrics
        self._running.stop()

    def _error(self) -> WorkerError:
        return WorkerError(self._failure or "the vLLM engine is closed")


def _failure() -> str:
    """The error that is being handled, with its cause where that is known."""
    text = traceback.format_exc()
    cause = explain(text)
    return f"vLLM failed{f': {cause}' if cause else ''}\n{text}"


def _completing(detokenizer: Any, tokens: Sequence[int]) -> int | None:
    """Count the tokens up to the one that completes a stop string; None where none does."""
    for index, token in enumerate(tokens):
        if detokenizer.update([token], False) is not None:
            return index + 1
    return None


def _sampled(sample: Sample, tokens: Sequence[int], logprobs: Any) -> SampledTokens:
    """The new tokens of a sample for its reader, with vLLM's log-probabilities of them."""
    rows: list[dict[int, float]] = []
    if sample.read != TOKENS_ALONE and logprobs is not None:
        found = logprobs.logprob_token_ids[: len(tokens)], logprobs.logprobs[: len(tokens)]
        rows = logprob_rows(*found, 1 + (sample.read or 0))
    return SampledTokens(number=sample.number, first=len(sample.tokens), tokens=list(tokens), logprobs=rows)


def _forward_failure(added: Future[None], done: Future[None]) -> None:
    if added.exception() is not None:
        settle(done, added.exception())
