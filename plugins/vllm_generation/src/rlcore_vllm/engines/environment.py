"""The surroundings of vLLM: environment variables, and the state of the process that it runs in.

An engine in the trainer's process is what a run on a CPU takes by default, alone and on each rank of a cluster: it starts much
sooner than in a process of its own. vLLM takes the process that it runs in to be its own, so what it changes there is put back.
On CUDA the same code serves recipes that name the channel in_process.
"""

import contextlib
import gc
import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

from rlcore.spi import ContractError
from rlcore_torchkit.distributed.process_group import loopback_variables
from rlcore_vllm.engines import cleanup, versions
from rlcore_vllm.engines.model_classes import drop_prefix_cache_of_states, keep_transformers_classes
from rlcore_vllm.setup.settings import EngineSettings

_one_in_process = threading.Lock()
"""Held while an engine lives in this process: vLLM keeps its process groups in global variables, so it can live there once."""


_REPLACED: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("Event", "set_num_threads")),
    *((torch.accelerator, name) for name in ("synchronize", "empty_cache", "get_memory_info")),
    *((torch.cuda, name) for name in ("Event", "Stream", "current_stream", "set_stream", "stream")),
    *((torch.Tensor, name) for name in ("pin_memory", "record_stream")),
)
"""Parts of torch that vLLM replaces on CPU, some when it is imported; its engines need them, the trainer does not."""


def engine_variables(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that an engine is started with. How much is logged is the user's to say."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if settings.in_process else "INFO"),
    }
    # The option alone decides: a variable left over in a shell would slow engines down that nobody compares to the bit.
    variables["VLLM_BATCH_INVARIANT"] = str(int(settings.batch_invariant))
    if settings.batch_invariant:
        # The other runner takes log-probabilities by kernels of its own.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if settings.device == "cpu" or settings.has_drafter:
        # On a CPU the other runner replaces parts of torch for the whole process. On GPUs it has no drafters that are language
        # models, and gives heads no weights where the policy begins with none.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if settings.device == "cpu":
        if settings.tensor_parallel > 1:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get(
                "VLLM_CPU_OMP_THREADS_BIND", omp_threads_bind(settings.tensor_parallel)
            )
    elif settings.model.dtype == "float32":
        # Who asks for float32 wants the trainer's numbers; Triton's attention would multiply in TF32, which is off by 1e-3.
        variables["TRITON_F32_DEFAULT"] = os.environ.get("TRITON_F32_DEFAULT", "ieee")
    return variables


def child_environment(settings: EngineSettings, devices: tuple[int, ...]) -> dict[str, str]:
    """The environment of a process that hosts an engine on these CUDA devices, counted among those that this process sees."""
    # All ranks of an engine are on this machine. By NCCL they may also meet a trainer that listens elsewhere.
    by_loopback = {name: value for name, value in loopback_variables().items() if name.startswith("GLOO")}
    variables = {**by_loopback, **os.environ, **engine_variables(settings)}
    if settings.eager:
        variables.setdefault("TORCHDYNAMO_DISABLE", "1")
    if settings.device == "cuda":
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[device] if visible else str(device) for device in devices)
        # vLLM's allocator, which sleeping needs, refuses it.
        options = variables.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",")
        variables["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(option for option in options if "expandable_segments" not in option)
    return variables


def omp_threads_bind(num_ranks: int) -> str:
    """The cores that this process may use, dealt out among the ranks; they share where there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_ranks:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
    share = len(cores) // num_ranks
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(num_ranks))


_FROZEN_BY_PYTHON = gc.get_freeze_count()
"""Python 3.12 keeps some objects of its own from collections."""


def is_frozen() -> bool:
    """Return whether this process keeps objects from collections."""
    return gc.get_freeze_count() > _FROZEN_BY_PYTHON


class RunningEngine:
    """vLLM's LLMEngine with its core in this process. While it runs in the trainer's process, torch keeps what vLLM replaced in
    it; all else is as it was, and torch too once `stop` returns."""

    _replacements: ClassVar[list[Any] | None] = None
    """vLLM's, as the last engine left them: importing it a second time replaces nothing."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start; what vLLM raises passes through. ContractError where an engine lives in the trainer's process already."""
        self._settings, self._in_process = settings, settings.in_process
        self._host_was_frozen = settings.in_process and is_frozen()
        if not self._in_process:
            os.environ.update(engine_variables(settings))
            with _without_collections(settings):
                self.llm = _build(settings)
            return
        if not _one_in_process.acquire(blocking=False):
            raise ContractError(
                "vllm: found an engine in this process already; expected one at most. Close it first, or choose another "
                "refit.channel than in_process: engines then run in processes of their own"
            )
        self._hosts_own = [getattr(owner, name) for owner, name in _REPLACED]
        self._group_is_hosts = torch.distributed.is_initialized()
        try:
            with _host_kept(), alone(), _without_collections(settings):
                os.environ.update(engine_variables(settings))
                _put_in_place(self._replacements or self._hosts_own)
                self.llm = _build(settings)
            torch.set_num_threads = self._hosts_own[_REPLACED.index((torch, "set_num_threads"))]
        except BaseException:
            self._leave(_clean_up)
            self._collect()
            raise

    def stop(self) -> None:
        """Free its memory, its workers and its process groups. May be called once."""
        cleanup.keep_allocators()
        core = self.llm.engine_core
        del self.llm
        if self._in_process:
            self._leave(core.shutdown)
        else:
            core.shutdown()
        del core
        cleanup.forget_layers()
        cleanup.forget_compiled()
        self._collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _collect(self) -> None:
        """Free what is left of the engine, whose parts refer to each other, and keep what the host kept from garbage
        collection."""
        gc.collect()
        if self._host_was_frozen:
            gc.freeze()

    def _leave(self, shut_down: Callable[[], None]) -> None:
        try:
            with _host_kept(), _default_group_kept(self._group_is_hosts), _without_collections(self._settings):
                shut_down()
        finally:
            RunningEngine._replacements = [getattr(owner, name) for owner, name in _REPLACED]
            _put_in_place(self._hosts_own)
            _one_in_process.release()


def _put_in_place(functions: Sequence[Any]) -> None:
    for (owner, name), function in zip(_REPLACED, functions, strict=True):
        setattr(owner, name, function)


def _build(settings: EngineSettings) -> Any:
    versions.import_without_torchao()
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if settings.tensor_parallel > 1:
        versions.copy_messages()
    if settings.device == "cuda":
        versions.import_constants()
    elif settings.tensor_parallel > 1:
        versions.wait_without_spinning()
        versions.fork_ranks()
    if settings.device == "cpu":
        versions.replace_kernels_once()
        versions.judge_guesses_on_cpu()
        versions.zero_new_blocks()
        versions.rotate_all_heads()
        drop_prefix_cache_of_states()
    if settings.in_process:
        keep_transformers_classes(eager=settings.eager)
    if settings.has_drafter:
        versions.read_drafters_weights()
    if settings.eager:
        versions.keep_sampler_eager()
    if settings.in_process and settings.device == "cpu":
        versions.keep_sampler_off_global_generator(settings.arguments["seed"])
    return LLMEngine.from_engine_args(EngineArgs(**settings.arguments))


def _clean_up() -> None:
    """Free what is left of an engine that did not start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _without_collections(settings: EngineSettings) -> Iterator[None]:
    """On a CPU, disable vLLM's calls of gc.collect, eight an engine of half a second each. One collection follows the end."""
    if settings.device != "cpu" or settings.tensor_parallel > 1:  # ranks are forked, and would never collect
        yield
        return
    with mock.patch.object(gc, "collect", return_value=0):
        yield


@contextlib.contextmanager
def _replaced(**functions: Any) -> Iterator[None]:
    """Put other functions in the place of those of torch.distributed."""
    before = {name: getattr(torch.distributed, name) for name in functions}
    vars(torch.distributed).update(functions)
    try:
        yield
    finally:
        vars(torch.distributed).update(before)


@contextlib.contextmanager
def _default_group_kept(is_hosts: bool) -> Iterator[None]:
    """Let vLLM destroy its own process groups, but not a default group that was there before it."""
    destroy = torch.distributed.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None or not is_hosts:
            destroy(group)

    with _replaced(destroy_process_group=destroy_own):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let vLLM find a default group of one, of which it makes its own, where this process is one of several ranks.

    With the real one every rank's engine would have to start, and to start anew after a failure, together with all others.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    get_rank, get_world_size = torch.distributed.get_rank, torch.distributed.get_world_size
    new_group, rank = torch.distributed.new_group, get_rank()

    def own_group(ranks: Sequence[int], *arguments: Any, **options: Any) -> Any:  # noqa: ARG001 - [0], the one there seems to be
        return new_group([rank], *arguments, **options, use_local_synchronization=True)

    with _replaced(
        get_rank=lambda group=None: 0 if group is None else get_rank(group),
        get_world_size=lambda group=None: 1 if group is None else get_world_size(group),
        new_group=own_group,
    ):
        yield


@contextlib.contextmanager
def _host_kept() -> Iterator[None]:
    """Restore what vLLM changes in its process: environment, random states, dtype, thread count, garbage collection."""
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state()
    dtype, num_threads, set_num_threads = torch.get_default_dtype(), torch.get_num_threads(), torch.set_num_threads
    excepthook, start_method = sys.excepthook, multiprocessing.get_start_method(allow_none=True)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    was_frozen = is_frozen()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            random.setstate(states[0])
            np.random.set_state(states[1])
            if torch.get_num_threads() != num_threads:
                set_num_threads(num_threads)
            torch.set_default_dtype(dtype)
            sys.excepthook = excepthook
            if start_method is None:
                multiprocessing.set_start_method(None, force=True)
            if not was_frozen:
                gc.unfreeze()
