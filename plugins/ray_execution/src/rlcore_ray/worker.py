"""Worker process of one rank, with a trainer and, where the rank hosts one, a generator."""

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.execution import (
    ChosenPlugins,
    GeneratorHandle,
    GradientsRequest,
    GradientsResult,
    LoadedPlugins,
    TokensRequest,
    TrainerHandle,
    closed_after,
    exit_error,
    gradients_of,
    is_outside,
    make_room,
    per_token_results,
    recorded_export,
    register_fatal_error,
    run_stream,
)
from rlcore.secrets import masked_traceback
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore.spi.execution import RefitCommand
from rlcore_ray.affinity import bind_near
from rlcore_ray.commands import (
    Arrival,
    BuildCommand,
    Built,
    GeneratorCommand,
    RefittedRank,
    Software,
    TrainedModel,
    WorkerEnv,
)
from rlcore_ray.dispatch import RankPart
from rlcore_ray.failures import PoolName, RemoteError, Reply, WorkerInfo
from rlcore_ray.network_variables import set_network_variables
from rlcore_ray.orphan_processes import mark_children
from rlcore_ray.output import redirect_output
from rlcore_ray.published_weights import PublishedWeights, Publisher
from rlcore_ray.step_data_cache import CachedColumn, StepDataCache
from rlcore_ray.worker_stream import Collected, NumberedRequest, WorkerStream

RequestT = TypeVar("RequestT", bound=GradientsRequest)


class Worker:
    """Runs in a process that Ray makes. `call` carries out its work in turn; a stream has a thread of its own, and `beside`
    reaches it."""

    def __init__(self, rank: int, log_file: Path, pool: PoolName = "trainer") -> None:
        register_fatal_error(_is_rays_end)
        self._rank = rank
        self._pool: PoolName = pool
        self._log_file = log_file
        self._trainer: TrainerHandle | None = None
        self._critic: TrainerHandle | None = None
        self._generator: GeneratorHandle | None = None
        self._decoder: spi.TextDecoder | None = None
        self._plugins: LoadedPlugins | None = None
        self._reserved: socket.socket | None = None
        self._thread: int | None = None
        self._doing = ""
        self._stream: WorkerStream | None = None
        self._held: StepDataCache | None = None
        self._publisher: Publisher | None = None

    def call(self, name: str, *arguments: Any) -> Reply:
        """Carry out one of the methods below; what it raises is returned, so that it keeps its class."""
        self._thread, self._doing = threading.get_ident(), name
        try:
            return self.beside(name, *arguments)
        finally:
            self._doing = ""

    def beside(self, name: str, *arguments: Any) -> Reply:
        """`call` of what may run while another call does."""
        try:
            value, error = getattr(self, name)(*arguments), None
        except BaseException as raised:  # a panic in a native library is no Exception
            if is_outside(raised):
                raise
            sys.stdout.flush()
            # To Ray, a plugin's SystemExit is an actor that ends as it was told to.
            failure = exit_error(name, raised) if isinstance(raised, SystemExit) else raised
            value, error = None, RemoteError.of(failure, self._log_file)
            print(masked_traceback(raised), file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        handles = [handle for handle in (self._trainer, self._critic, self._generator) if handle is not None]
        return Reply(value=value, error=error, is_usable=all(handle.is_usable for handle in handles))

    def where(self) -> str:
        """Return what the rank is doing, and at which line; answered beside the calls."""
        doing = [(self._doing, self._thread), ("stream", None if self._stream is None else self._stream.thread)]
        frames, positions = sys._current_frames(), []
        for name, thread in doing:
            if name and thread in frames:
                last = traceback.extract_stack(frames[thread])[-1]
                positions.append(f"in {name}, at {last.filename}:{last.lineno} in {last.name}")
        return " and ".join(positions) or "idle"

    def arrive(self) -> Arrival:
        """Turn the process's output to its log, and say where it is."""
        import ray

        redirect_output(self._log_file)
        context = ray.get_runtime_context()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        here = WorkerInfo(
            rank=self._rank,
            pool=self._pool,
            node=address,
            node_id=context.get_node_id(),
            pid=os.getpid(),
            log_file=self._log_file,
            gpu_ids=tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
        )
        print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {here}", flush=True)
        return Arrival(worker=here, software=Software.here(), clock=time.time())

    def sees(self, file: Path) -> bool:
        """Return whether a file of the driver's is there."""
        return file.is_file()

    def prepare(self, plugins: ChosenPlugins, surroundings: WorkerEnv) -> None:
        """Load the plugins that the driver chose, and set the process up for them; nothing heavy is imported before."""
        mark_children(surroundings.pool)
        if surroundings.directory.is_dir():
            os.chdir(surroundings.directory)
        cores = bind_near(surroundings.rank_gpu_ids)
        if surroundings.gpu_ids:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(surroundings.gpu_ids)
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        set_network_variables()
        share = max(1, len(cores) // surroundings.ranks_on_node)
        os.environ["OMP_NUM_THREADS"] = surroundings.num_threads or str(share)
        self._plugins = plugins.load(self._rank, observed=self._pool == "trainer")

    def rendezvous(self) -> str:
        """Return an address at which the ranks can meet.

        On Linux its port is kept from others until the trainer, in this process, listens there with SO_REUSEADDR, as torch's
        store does; elsewhere until the trainer is built.
        """
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((host, 0))
        port = self._reserved.getsockname()[1]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def build(self, order: BuildCommand) -> Built:
        """Build the trainer and, where there is one, the critic, together with all other ranks; make room for generators."""
        assert self._plugins is not None
        if sys.platform != "linux":  # elsewhere no socket can listen at a port that another one is bound to
            self._release_port()
        try:
            self._trainer = self._plugins.build_trainer(order.trainer)
            if order.critic is not None:
                self._critic = self._plugins.build_trainer(order.critic)
        finally:
            self._release_port()
        make_room(self._trainer, order.trainer.room)
        if self._critic is not None and order.critic is not None:
            _require_same_layout(self._trainer.layout, self._critic.layout)
            make_room(self._critic, order.critic.room)
        return Built(layout=self._trainer.layout)

    def build_generator(self, order: GeneratorCommand) -> None:
        """Build the generator that this rank hosts, once every rank has made room: it may span several ranks' devices."""
        assert self._plugins is not None
        self._generator = self._plugins.build_generator(order.arguments)
        self._decoder = pickle.loads(order.decoder)

    def hold_step(
        self,
        model: TrainedModel,
        columns: Sequence[CachedColumn],
        updates: Int64Array,
        parts: Sequence[RankPart],
        number: int,
    ) -> None:
        """Keep this rank's share of a step for its updates, and compute the log-probabilities that they read; the last step's
        is dropped."""
        self._held = None
        held = StepDataCache(parts[number], updates)
        for column in columns:
            held.compute(self._trainer_handle(model), column)
        self._held = held

    def train_step(
        self, model: TrainedModel, request: GradientsRequest, parts: Sequence[RankPart] | None, number: int, returns: bool
    ) -> GradientsResult:
        """Train on this rank's share of an optimizer step: one of its node's `parts`, or without these what it holds for the
        update `number`. Ranks that only help another one return no log-probabilities."""
        result = gradients_of(self._trainer_handle(model), self._filled(request, parts, number))
        return result if returns else evolve(result, logprobs=None)

    def _filled(self, request: RequestT, parts: Sequence[RankPart] | None, number: int) -> RequestT:
        microbatches = self._take_held(number, request.loss) if parts is None else parts[number].microbatches()
        return evolve(request, microbatches=microbatches)

    def forward_backward(
        self, model: TrainedModel, request: GradientsRequest, parts: Sequence[RankPart] | None, number: int, returns: bool
    ) -> GradientsResult:
        """Add the gradients of this rank's share of a piece of a step; the arguments are those of train_step."""
        return self.train_step(model, request, parts, number, returns)

    def forward_backward_together(
        self,
        model: TrainedModel,
        requests: Mapping[str, spi.ForwardBackwardRequest],
        returns: bool,
        numbers: Sequence[int],
        *parts: Sequence[RankPart] | None,
    ) -> dict[str, spi.ForwardBackwardResult]:
        """Add the gradients of this rank's share of a piece of each adapter; `numbers` and `parts` are those of train_step."""
        shares = zip(requests.items(), parts, numbers, strict=True)
        pieces = {name: self._filled(request, own, number) for (name, request), own, number in shares}
        request = spi.ForwardBackwardTogetherRequest(pieces=pieces)
        results = self._trainer_handle(model).forward_backward_together(request).pieces
        return {name: result if returns else evolve(result, logprobs=None) for name, result in results.items()}

    def optim_step(self, model: TrainedModel, request: spi.OptimStepRequest) -> spi.OptimStepResult:
        """Make an optimizer step of the gradients that this rank holds."""
        return self._trainer_handle(model).optim_step(request)

    def use_adapter(self, model: TrainedModel, request: spi.UseAdapterRequest) -> spi.UseAdapterResult:
        """Change this rank's trainer to another adapter."""
        return self._trainer_handle(model).use_adapter(request)

    def token_figures(
        self, model: TrainedModel, request: TokensRequest, parts: Sequence[RankPart], number: int, returns: bool
    ) -> Float32Array | None:
        """Return float32 [T], the log-probabilities or values of this rank's share; None from ranks that only help another
        one."""
        found = per_token_results(self._trainer_handle(model), request, parts[number].microbatches())
        return np.concatenate(found) if returns else None

    def refit(self, order: RefitCommand, publishes: bool) -> RefittedRank:
        """Export the weights, and bring this rank's generator to them where it hosts one.

        Every rank takes part in the export to its end, also where its generator fails: the others wait for it. `publishes`:
        rank 0 leaves the weights in Ray's store, too.
        """
        export = self._trainer_handle("policy").export_weights(order.export)
        sent: dict[str, int] = {}
        export = recorded_export(export, sent)
        self._publisher = Publisher() if publishes and self._rank == 0 else None
        if self._publisher is not None:
            export = self._publisher.watch(export)
        drafts: spi.DraftCounts | None = None
        taken, is_starting, sent_bytes = 0, False, None
        if self._generator is not None:
            try:
                result = self._generator.refit(order.request(export, waits=self._rank not in order.not_awaited))
                drafts, taken, is_starting = result.drafts, result.shard_digest or 0, result.is_starting
                sent_bytes = result.sent_bytes
            finally:
                for _ in export.buckets:
                    pass
        else:
            for _ in export.buckets:
                pass
        shards = export.shards
        return RefittedRank(
            digests=sent,
            shards_sent=None if shards is None else shards.digest,
            sent_bytes=sent_bytes if shards is None else shards.sent_bytes,
            shards_taken=taken,
            drafts=drafts,
            is_starting=is_starting,
        )

    def published_weights(self) -> PublishedWeights | str | None:
        """Return the weights that the last refit has published, or the reason why they are not there."""
        publisher, self._publisher = self._publisher, None
        return None if publisher is None else publisher.failure or publisher.published()

    def refit_published(self, order: RefitCommand, weights: PublishedWeights) -> spi.DraftCounts | None:
        """Bring the generator of a process without a trainer to published weights; the counts of its drafts since the refit
        before."""
        return self._generator_handle().refit(order.request(weights.export())).drafts

    def stream_begin(self, weight_version: int) -> None:
        """Begin a stream of the generator."""
        if self._stream is not None and self._stream.thread is not None:
            raise spi.ContractError("a worker is asked for a second stream while one runs; this is a defect of the driver")
        assert self._decoder is not None
        self._stream = WorkerStream(partial(run_stream, self._generator_handle(), self._decoder), weight_version)

    def stream_add(self, requests: Sequence[NumberedRequest]) -> None:
        """Have the stream generate more."""
        assert self._stream is not None
        self._stream.add(requests)

    def stream_collect(self) -> Collected:
        """Return what has ended since the last time, as soon as something has; what the generator raised is raised."""
        assert self._stream is not None
        return self._stream.collect()

    def stream_end(self) -> None:
        """End the stream, where there is one: what has not ended comes back as it is."""
        if self._stream is not None:
            self._stream.end()

    def stream_standby(self) -> None:
        """Nothing: a rank that takes no part in the stream answers as long as it lives."""

    def move_trainer(self, model: TrainedModel, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Move what a trainer holds; returns what is left on the device."""
        return self._trainer_handle(model).set_residency(request)

    def move_generator(self, request: spi.SetResidencyRequest) -> int:
        """Bytes left on the device."""
        return self._generator_handle().set_residency(request).device_bytes

    def save_trainer(self, model: TrainedModel, request: spi.SaveStateRequest) -> tuple[str, ...]:
        """The files that this rank wrote."""
        return self._trainer_handle(model).save_state(request).files

    def save_generator(self, request: spi.SaveStateRequest) -> tuple[str, ...]:
        """The files that this rank wrote."""
        return self._generator_handle().save_state(request).files

    def load_trainer(self, model: TrainedModel, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore a trainer's state."""
        return self._trainer_handle(model).load_state(request)

    def load_generator(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore the generator's state."""
        return self._generator_handle().load_state(request)

    def close(self) -> None:
        """End the stream, and close the trainer and the generator."""
        if self._stream is not None:
            self._stream.end()
            self._stream.join()
        with ExitStack() as stack:
            for handle in (self._trainer, self._critic, self._generator):
                if handle is not None:
                    stack.enter_context(closed_after(handle))

    def _take_held(self, number: int, loss: spi.LossSpec) -> tuple[spi.TokenBatch, ...]:
        held = self._held
        if held is None:
            raise spi.ContractError("a worker is to train on what it does not hold; this is a defect of the driver")
        if held.is_last(number):
            self._held = None
        return held.take(number, loss)

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()

    def _trainer_handle(self, model: TrainedModel) -> TrainerHandle:
        handle = self._trainer if model == "policy" else self._critic
        if handle is None:
            raise spi.ContractError("a worker is asked before it has built its trainer; this is a defect of the driver")
        return handle

    def _generator_handle(self) -> GeneratorHandle:
        if self._generator is None:
            raise spi.ContractError("a worker without a generator is asked for what only those with one do; this is a defect")
        return self._generator


def _is_rays_end(error: BaseException) -> bool:
    """Return whether an error is the SystemExit with which Ray ends a worker on SIGTERM, at any line of code."""
    return isinstance(error, SystemExit) and hasattr(error, "ray_terminate_msg")


def _require_same_layout(policy: spi.TrainerLayout, critic: spi.TrainerLayout) -> None:
    if policy != critic:
        raise spi.ContractError(
            f"layout: found {critic} of the critic; expected the policy's, {policy}: both get the same data"
        )
