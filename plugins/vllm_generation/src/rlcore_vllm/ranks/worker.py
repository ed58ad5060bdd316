"""Extends vLLM's worker in each rank of an engine. vLLM imports this file there by `worker_extension_cls`."""

import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from rlcore.spi import RefitError
from rlcore_torchkit.refit.held_digests import held_digests
from rlcore_vllm.engines import versions
from rlcore_vllm.engines.rank_recorders import Order, RankRecorders
from rlcore_vllm.ranks.adapters import slot_digests
from rlcore_vllm.ranks.exact_layers import compute_as_transformers
from rlcore_vllm.ranks.fixed_length_drafts import use_fixed_length_drafts
from rlcore_vllm.ranks.invariant import use_invariant_kernels
from rlcore_vllm.ranks.packed_weights import packed_outputs
from rlcore_vllm.ranks.weight_transfer import RlcoreWeightTransferEngine, register

register()
if current_platform.is_cpu():
    versions.wait_without_spinning()
    versions.zero_new_blocks()
    versions.rotate_all_heads()
else:
    versions.leave_room_for_recorder()
    with suppress(ModuleNotFoundError):  # a version that guesses elsewhere refuses to guess on the device itself
        use_fixed_length_drafts()
versions.keep_scales_exact()
compute_as_transformers()
if envs.VLLM_BATCH_INVARIANT:
    use_invariant_kernels()
# Multicast over NVLink is left off: where fabric and driver disagree about it, communicators hang.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


class WorkerExtension:
    """Becomes a base class of vLLM's worker, so its attributes are the worker's."""

    device: torch.device
    rank: int
    vllm_config: Any
    weight_transfer_engine: RlcoreWeightTransferEngine
    _rlcore_recorders: RankRecorders | None = None

    def rlcore_refit(self, step: str, content: dict[str, Any]) -> dict[str, Any]:
        """One step of a refit: describe, connect, begin, bucket, needs or shards, finish, or abandon.

        What goes wrong is returned, as "refused" or "failed", and never raised: after an exception of one rank, vLLM takes the
        others' answers for those to its next call.
        """
        try:
            with set_current_vllm_config(self.vllm_config), _current_device(self.device):
                return self._rlcore_step(step, content)
        except RefitError as error:
            return {"refused": str(error)}
        except Exception:
            return {"failed": traceback.format_exc().strip()}

    def rlcore_record(self, rank: int, orders: Sequence[Order]) -> dict[str, Any]:
        """Carry out the orders of an engine of several ranks to the recorders of one of them; the others have none."""
        if self.rank != rank:
            return {}
        if self._rlcore_recorders is None:
            self._rlcore_recorders = RankRecorders()
        worker: Any = self
        with _current_device(self.device):
            return self._rlcore_recorders.carry_out(orders, worker.model_runner)

    def rlcore_held_digests(self, adapter: int = 0) -> dict[str, int]:
        """The digests of what this rank computes with: of the model, or of the slot of an adapter by its number."""
        worker: Any = self
        with _current_device(self.device):
            model = worker.model_runner.get_model()
            return slot_digests(model, adapter) if adapter else held_digests(model, packed_outputs)

    def _rlcore_step(self, step: str, content: dict[str, Any]) -> dict[str, Any]:
        worker: Any = self
        match step:
            case "describe":
                return _describe(self.device, self.rank)
            case "connect":
                worker.init_weight_transfer_engine(content)
            case "begin":
                if worker._weight_update_active:
                    self._rlcore_abandon()  # its sender gave up on it
                worker.start_weight_update()
                worker.update_weights({"manifest": content})
            case "bucket":
                worker.update_weights({"bucket": content})
            case "needs":
                return {"needs": self.weight_transfer_engine.needs()}
            case "shards":
                worker.update_weights({"shards": content})
            case "finish":
                if self.weight_transfer_engine.brings_weights:
                    worker.finish_weight_update()
                else:  # it would take away all adapters, as behind weights that are others
                    self.weight_transfer_engine.finish_weight_update()
                    self._rlcore_end()
                self.weight_transfer_engine.put_adapters_in_place()
                return self.weight_transfer_engine.acknowledgement()
            case "abandon":
                self._rlcore_abandon()
            case _:
                raise ValueError(f"no step {step} of a refit")
        return {}

    def _rlcore_abandon(self) -> None:
        self.weight_transfer_engine.abandon()
        self._rlcore_end()

    def _rlcore_end(self) -> None:
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False


def _describe(device: torch.device, rank: int) -> dict[str, Any]:
    """Describe this rank to channels."""
    rank_info: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "rank": rank, "device": device.type}
    if device.type == "cuda":
        rank_info["uuid"] = str(torch.cuda.get_device_properties(device).uuid)
    return rank_info


@contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    """Make `device` the thread's current one: in process, a refit may come from a thread with another."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield
