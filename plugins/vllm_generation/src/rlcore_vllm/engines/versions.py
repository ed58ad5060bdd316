"""Differences between vLLM 0.26 and 0.33, and every internal name of vLLM that the engine uses."""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Mapping, Sequence, Set
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch

from rlcore_torchkit.transformers_import import import_transformers, without_torchao
from rlcore_vllm.engines.draft_counter import DraftCounter
from rlcore_vllm.engines.rank_recorders import Logprobs, Masks, RankCalls, RemoteLogprobs, RemoteMasks
from rlcore_vllm.engines.recorder import LogprobRecorder, most_bytes, record
from rlcore_vllm.engines.sampling_masks import MaskRecorder


def import_without_torchao() -> None:
    """Import what would import torchao, which only models quantised by it need; called before anything else of vLLM."""
    import_transformers()
    with without_torchao(), contextlib.suppress(ImportError):
        importlib.import_module("vllm.model_executor.layers.quantization.torchao")


NO_ADAPTER = 0
"""The number that stands for the model without adapters; vLLM's own numbers begin with 1."""


def make_request(
    request_id: str, prompt: list[int], params: Any, *, adapter: int = NO_ADAPTER, features: Sequence[Any] | None = None
) -> Any:
    """Return an EngineCoreRequest of the adapter with vLLM's number; `features` are those of the prompt's images."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

    # The path is never read: a refit has brought the adapter before anything is sampled. vLLM compares and caches by the name.
    named = LoRARequest(lora_name=f"adapter {adapter}", lora_int_id=adapter, lora_path="none") if adapter else None

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None if features is None else [copy(feature) for feature in features],
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=named,
        cache_salt=None,
        data_parallel_rank=None,
    )


def process_images(llm: Any, request_id: str, prompt: list[int], images: Sequence[Any]) -> tuple[list[int], Sequence[Any]]:
    """A prompt with one placeholder for each of its Pillow images as vLLM expands it, and the features of the images."""
    from vllm import SamplingParams

    given = {"prompt_token_ids": prompt, "multi_modal_data": {"image": list(images)}}
    request = llm.input_processor.process_inputs(request_id, given, SamplingParams(), llm.get_supported_tasks())
    return request.prompt_token_ids, request.mm_features


def make_detokenizer(tokenizer: Any, params: Any) -> Any:
    """vLLM's search for the stop strings of its SamplingParams, in the text of a response alone.

    Given the prompt too, it would take a prompt that ends within a character for a part of the response's text.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer.from_new_request(tokenizer, make_request("", [], params))


def set_paused(core: Any, paused: bool) -> None:
    """Return whether the scheduler leaves every request where it is."""
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)


def num_queued_batches(core: Any) -> int:
    """Batches that asynchronous scheduling has handed to the device and not yet read."""
    return len(core.batch_queue) if core.batch_queue is not None else 0


def has_work(core: Any) -> bool:
    """Return whether a step would do anything."""
    return bool(core.scheduler.has_requests() or num_queued_batches(core))


def drop_caches(core: Any) -> None:
    """Forget all that was computed under the present weights; running requests are kept and computed anew.

    The batches must be drained: what is still queued for a request that this takes off the device would be discarded.
    """
    if num_queued_batches(core):
        raise RuntimeError("the batches in flight must be drained before the caches are dropped")
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("vLLM did not drop its prefix cache")
    core.reset_mm_cache()
    core.scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


def rotate_all_heads() -> None:
    """Have a CPU rotate all heads of queries [tokens, heads, size], as those of latent attention are: its kernel takes them for
    one head, and leaves the others as they are."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if hasattr(RotaryEmbedding, "rlcore_forward"):
        return
    RotaryEmbedding.rlcore_forward = RotaryEmbedding.forward_cpu

    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        rotate = self.forward_native if query.dim() == 3 else self.rlcore_forward
        return rotate(positions, query, key)

    RotaryEmbedding.forward_cpu = forward


def zero_new_blocks() -> None:
    """On a CPU, zero each block of the KV cache as a sequence gets it.

    Attention there multiplies what a block holds behind the sequence's end by 0 and adds it up, and 0 * NaN is NaN. So keys and
    values of weights that overflow or are NaN would spoil samples of the good weights after them, for as long as blocks that
    hold them are not full.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def zero(self: Any, block_ids: Sequence[int]) -> None:
        # vLLM's own leaves out the layers that attend to a window.
        config, layers = self.kv_cache_config, self.compilation_config.static_forward_context
        caches = (layers[name].kv_cache for group in config.kv_cache_groups for name in group.layer_names if name in layers)
        # Layers share caches; those of states are no tensors, and vLLM begins them itself.
        shared = {cache.data_ptr(): cache for cache in caches if isinstance(cache, torch.Tensor)}
        for cache in shared.values():
            cache.unflatten(0, (config.num_blocks, -1))[block_ids] = 0

    KVCacheConfig.needs_kv_cache_zeroing = True
    CPUModelRunner._zero_block_ids = zero


def draft_counter(core: Any) -> DraftCounter | None:
    """Return the counter of the guesses that the scheduler judges; None where no tokens are guessed."""
    return DraftCounter(core.scheduler) if core.vllm_config.speculative_config is not None else None


def rank_calls(llm: Any) -> RankCalls | None:
    """Return the calls to the recorders of an engine of several ranks; None where its one rank is in this process."""
    return RankCalls(llm.model_executor) if llm.vllm_config.parallel_config.world_size > 1 else None


def logprob_recorder(llm: Any, calls: RankCalls | None) -> Logprobs | None:
    """Return the recorder that keeps log-probabilities on the device, on CUDA where the model runner allows it."""
    config = llm.vllm_config
    if config.device_config.device_type != "cuda":
        return None
    if calls is not None:
        return RemoteLogprobs.start(calls, config.scheduler_config.max_num_seqs)
    recorder: LogprobRecorder | None = llm.collective_rpc(lambda worker: record(worker.model_runner))[0]
    return recorder


def mask_recorder(llm: Any, calls: RankCalls | None) -> Masks:
    """Return the recorder of the tokens that others are sampled among."""
    if calls is not None:
        return RemoteMasks(calls)
    recorder: MaskRecorder = llm.collective_rpc(lambda worker: MaskRecorder(worker.model_runner))[0]
    return recorder


def leave_room_for_recorder(worker: Any = None) -> None:
    """Have vLLM's worker for CUDA subtract the recorder's memory from the KV cache, on every rank, since all have caches of one
    size."""
    worker = worker or importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    if hasattr(worker, "rlcore_measured"):
        return
    worker.rlcore_measured = worker.determine_available_memory
    worker.determine_available_memory = lambda self: self.rlcore_measured() - most_bytes(self.model_runner)


def wait_without_spinning() -> None:
    """Have the ranks of an engine on a CPU, and the process that calls them, sleep while they wait for each other.

    vLLM's look for the next message without a pause for a second first, on the very cores that the others compute on.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(time.sleep, 1e-4)


def copy_messages() -> None:
    """Let what comes from another process of an engine stay as it is for as long as it is held.

    Up to 0.31 an array of 1 MiB or more is a view of the queue's memory, which the tenth message after it overwrites. Experts
    of a long prompt are held until its sample ends, and the answer to a batch in flight until the next step, however much
    recorders are asked meanwhile.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    def loads(data: Any, *, buffers: Sequence[Any] = ()) -> Any:
        # 0.32 copies by itself, and what came by a socket is a frame of its own.
        return pickle.loads(data, buffers=[bytearray(one) if isinstance(one, memoryview) else one for one in buffers])

    copying = ModuleType(pickle.__name__)
    vars(copying).update({**vars(pickle), "loads": loads})
    shm_broadcast.pickle = copying


def fork_ranks() -> None:
    """Fork the ranks of an engine on a CPU from its process, which saves each 10 s of imports. OpenMP gets their cores
    afterwards."""
    from vllm.v1.executor import multiproc_executor as executor

    if "libiomp" in os.environ.get("LD_PRELOAD", "") or hasattr(executor, "rlcore_begin"):
        return  # Intel's OpenMP is bound by variables of its own; or this is done already
    executor.rlcore_begin = executor.WorkerProc.worker_main

    def begin(**arguments: Any) -> None:
        bind_threads()
        executor.rlcore_begin(**arguments)

    executor.WorkerProc.worker_main = staticmethod(begin)
    executor.get_mp_context = partial(multiprocessing.get_context, "fork")


def bind_threads() -> None:
    """Compute on the cores that vLLM has written into this rank's environment, with a thread for each."""
    variables = (os.environ.get(name, "") for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES"))
    cores = [int(core) for core in re.findall(r"\d+", next(filter(None, variables), ""))]
    if os.environ.get("OMP_NUM_THREADS") == str(len(cores)):
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def replace_kernels_once() -> None:
    """Have vLLM search for Triton's kernels on a CPU once a process, and not whenever an engine starts."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # in versions that have none
        return
    if hasattr(dispatcher, "rlcore_register"):
        return
    dispatcher.rlcore_register = dispatcher.register_kernels

    def register(overrides: Mapping[str, Any]) -> None:
        if not overrides.keys() <= dispatcher._registry.keys():
            dispatcher.rlcore_register(overrides)

    dispatcher.register_kernels = register


def judge_guesses_on_cpu() -> None:
    """Replace functions of the sampler that fail where guessed tokens are judged on a CPU: 0.32 writes the temperature, top-k
    and top-p of each into a copy, reads memory that nothing was written to, and fails in a step without guesses."""
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        expanded = x.repeat_interleave(counts.long(), output_size=num_tokens)
        return expanded.masked_fill(expanded == replace_from, replace_to)

    truncate = getattr(rejection_sampler.apply_top_k_top_p, "rlcore_own", rejection_sampler.apply_top_k_top_p)

    def truncated(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> Any:
        return truncate(logits, k, p) if len(logits) else logits

    truncated.rlcore_own = truncate  # type: ignore[attr-defined]
    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_top_k_top_p = truncated


def read_drafters_weights() -> None:
    """Load a drafter as its own configuration says; vLLM would take the policy's, which may make weights up."""
    from vllm.config.utils import replace
    from vllm.v1.spec_decode.draft_model import DraftModelProposer as Proposer

    own: Any = Proposer._create_draft_vllm_config
    if hasattr(own, "rlcore_own"):
        return

    def with_own_load_config(self: Any) -> Any:
        load_config = self.speculative_config.draft_load_config
        return replace(own(self), load_config=load_config or self.vllm_config.load_config)

    with_own_load_config.rlcore_own = own  # type: ignore[attr-defined]
    Proposer._create_draft_vllm_config = with_own_load_config


def keep_sampler_eager() -> None:
    """Run the one function of the sampler that vLLM compiles whatever enforce_eager says, and that costs 10 s, as it is."""
    from vllm.v1.sample import sampler

    function = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(function, "__wrapped__", function)


def keep_sampler_off_global_generator(seed: int) -> None:
    """On CPU, give the sampler a generator of its own: it would draw from torch's global one, and change the trainer's
    numbers."""
    from vllm.v1.sample.ops import topk_topp_sampler

    generator = torch.Generator().manual_seed(seed)

    class TorchOfTheSampler:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def randint(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.randint(*args, **{"generator": generator, **kwargs})

    topk_topp_sampler.torch = TorchOfTheSampler()


def without_weights(parameters: Set[str], reported: Set[str]) -> set[str]:
    """Parameters that `load_weights` did not report. 0.26 leaves a part out of the names of experts."""
    return {name for name in parameters if not {name, name.replace(".routed_experts.", ".")} & reported}


def keeps_checkpoint_form(quant_method: Any) -> bool:
    """Return whether, on CUDA, a layer's method leaves its weights as they were loaded, and keeps nothing made from them.

    Read in the sources of 0.26 and 0.32. Of the kernels for experts only Triton's take them as they are.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if type(quant_method) is UnquantizedFusedMoEMethod:
        return quant_method.unquantized_backend.name in {"TRITON", "BATCHED_TRITON"}
    return type(quant_method) in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def keep_scales_exact() -> None:
    """On Hopper, keep vLLM from rounding scales of blocks to powers of two, unless the variable is set."""
    from vllm.platforms import current_platform

    if current_platform.is_device_capability_family(90):
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")


def put_to_sleep(executor: Any, tags: set[str], discard_weights: bool) -> None:
    """Free at least the memory of these tags ("weights", "kv_cache"); weights are copied to the host unless discarded.

    From some version on the cache can be discarded alone, and part of an engine put to sleep while another part is already.
    """
    if "weights" not in tags and hasattr(executor, "discard"):
        executor.discard(tuple(tags))
        return
    if executor.sleeping_tags:
        executor.wake_up(sorted(executor.sleeping_tags))
    try:
        executor.sleep(level=2 if discard_weights and "weights" in tags else 1)
    except Exception as error:
        if "Memory usage increased after sleeping" not in str(error) or executor.parallel_config.world_size > 1:
            raise  # where there are several ranks, the others' answers would be taken for those to the next call
        # It sleeps. What grew meanwhile, on a device that others use too, is not the engine's.
        executor.sleeping_tags, executor.is_sleeping = {"weights", "kv_cache"}, True


def import_constants() -> None:
    """Import FlashInfer before an engine starts on CUDA: its constants would lie in the memory that sleeps, and outlive the
    engine."""
    with contextlib.suppress(ImportError):
        importlib.import_module("flashinfer")
