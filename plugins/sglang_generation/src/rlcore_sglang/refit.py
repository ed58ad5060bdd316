"""Bringing an engine to a trainer's weights, with proof that all of them have arrived."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlcore.schema.file_limits import expanded
from rlcore.spi import RefitError, WeightBucket, WeightExport
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.engine import Engine
from rlcore_sglang.scheduler import answer_file
from rlcore_torchkit.refit.arrivals import check_digests, check_names, check_shape, check_specs, refuse


@frozen(kw_only=True)
class Acknowledged:
    """The engine's weights after a refit."""

    digests: Mapping[str, int]
    """The digest of each tensor as it arrived in the engine's processes, by Hugging Face name."""
    num_bytes: int
    """The size of its parameters, in all its processes."""


class Refit:
    """The way of weights into an engine: files of tensors, which every process of the engine reads."""

    def __init__(self, channel: str, shapes: Mapping[str, tuple[int, ...]], config: SglangConfig) -> None:
        """`shapes` are those of all tensors of the model, by Hugging Face name."""
        self._shapes = shapes
        self._config = config
        parent = expanded(config.refit_directory) if config.refit_directory and channel == "directory" else None
        self._directory = Path(tempfile.mkdtemp(prefix="rlcore-sglang-", dir=parent))
        self._memory = os.memfd_create("rlcore-refit") if channel == "shared_memory" else None

    def run(self, engine: Engine, export: WeightExport) -> Acknowledged:
        """Load an export. RefitError, after which the engine holds no weights that count, where a tensor is missing, unknown,
        repeated, misshapen or not what its digest says, and where a parameter of the engine was filled by none."""
        check_specs(export.specs, self._shapes)
        self._call(engine, "begin_update")
        self._order(engine, "begin")
        digests: dict[str, int] = {}
        for bucket in export.buckets:
            digests |= self._send(engine, bucket, digests)
        refuse("missing from the buckets", self._shapes.keys() - digests.keys())
        answers = self._order(engine, "end")
        self._call(engine, "end_update")
        refuse("of SGLang's model filled by no tensor, or not finite", {name for each in answers for name in each["unfilled"]})
        return Acknowledged(digests=digests, num_bytes=sum(each["num_bytes"] for each in answers))

    def held_digests(self, engine: Engine) -> list[dict[str, int]]:
        """The digest of each tensor that a process of the engine computes with, process by process."""
        self._call(engine, "begin_update")
        answers = self._order(engine, "held")
        self._call(engine, "end_update")
        return [each["digests"] for each in answers]

    def close(self) -> None:
        """Let go of what weights travel through."""
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _send(self, engine: Engine, bucket: WeightBucket, before: Mapping[str, int]) -> dict[str, int]:
        """Load a bucket; the digests of its tensors, which every process of the engine has found."""
        check_names([named.name for named in bucket.tensors], self._shapes, before)
        claimed = {named.name: named.digest for named in bucket.tensors}
        tensors = {named.name: torch.as_tensor(named.tensor).detach().cpu().contiguous() for named in bucket.tensors}
        for name, tensor in tensors.items():
            check_shape(name, tuple(tensor.shape), self._shapes)
        for answer in self._order(engine, "bucket", file=str(self._write(tensors))):
            check_digests(answer["digests"], claimed)
        return claimed

    def _write(self, tensors: Mapping[str, Tensor]) -> Path:
        """A safetensors file that the engine can read."""
        from safetensors.torch import save, save_file

        if self._memory is None:
            file = self._directory / "bucket.safetensors"
            save_file(dict(tensors), file)
            return file
        content = save(dict(tensors))
        os.ftruncate(self._memory, len(content))
        written = 0
        while written < len(content):
            written += os.pwrite(self._memory, memoryview(content)[written:], written)
        return Path(f"/proc/{os.getpid()}/fd/{self._memory}")

    def _order(self, engine: Engine, step: str, **details: str) -> list[dict[str, Any]]:
        """Have the engine's processes do a step of `scheduler.load`; what each answers."""
        answer = self._directory / "answer"
        files = [answer_file(answer, rank) for rank in range(self._config.tensor_parallel)]
        for file in files:
            file.unlink(missing_ok=True)
        self._call(engine, "load", {"step": step, "answer": str(answer), **details})
        silent = [rank for rank, file in enumerate(files) if not file.exists()]
        if silent:
            raise RefitError(f"refit: found no answer to {step!r} from SGLang's ranks {silent}; expected one from each")
        answers = [json.loads(file.read_text()) for file in files]
        if errors := [each["error"] for each in answers if "error" in each]:
            raise RefitError(f"refit: SGLang's process failed in {step!r}: {errors[0]}")
        return answers

    def _call(self, engine: Engine, method: str, *arguments: Any) -> None:
        engine.ask(method, *arguments, timeout_s=self._config.refit_timeout_s, key="refit_timeout_s")
