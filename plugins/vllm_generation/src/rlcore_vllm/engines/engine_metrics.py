"""vLLM's own metrics for Prometheus, in a file: engines listen on no port, and a driver elsewhere reads the file."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric, write_to_textfile

WRITE_S = 2.0
"""Seconds between two writes of the file."""
OURS = "vllm:"


class VllmFamilies:
    """A collector of what vLLM has registered in this process, and of nothing else that is there."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics whose names begin with "vllm:"."""
        return (family for family in REGISTRY.collect() if family.name.startswith(OURS))


class EngineMetrics:
    """Feeds vLLM's statistics of an engine whose outputs this package reads in the place of vLLM, and writes them to a file.

    All but the writing is called in the engine's thread.
    """

    def __init__(self, llm: Any, file: Path) -> None:
        """Begin to write. `llm` is an LLMEngine that was built with statistics."""
        self._llm, self._file = llm, file
        self._requests: dict[str, SimpleNamespace] = {}
        """vLLM's state of each request, as far as statistics read it."""
        self._families = CollectorRegistry()
        self._families.register(VllmFamilies())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="vllm-metrics", daemon=True)
        self._thread.start()

    def begin(self, request_id: str, prompt_length: int, limit: int, adapter: str | None) -> None:
        """Count a request from now on."""
        from vllm.v1.metrics.stats import RequestStateStats

        self._requests[request_id] = SimpleNamespace(
            request_id=request_id,
            external_req_id=request_id,
            parent_req=None,
            prompt_len=prompt_length,
            max_tokens_param=limit,
            num_cached_tokens=0,
            lora_name=adapter,
            is_prefilling=True,
            stats=RequestStateStats(arrival_time=time.time()),
        )

    def record(self, outputs: Any) -> None:
        """Count a step's EngineCoreOutputs."""
        from vllm.v1.metrics.stats import IterationStats

        processor, iteration = self._llm.output_processor, IterationStats()
        for output in outputs.outputs:
            if (request := self._requests.get(output.request_id)) is None:
                continue
            processor._update_stats_from_output(request, output, outputs.timestamp, iteration)
            request.is_prefilling = False
            if output.finish_reason is not None:
                processor._update_stats_from_finished(request, output.finish_reason, iteration)
                del self._requests[output.request_id]
        self._record(outputs.scheduler_stats, iteration)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Count requests no more that were aborted."""
        for request_id in request_ids:
            if (request := self._requests.pop(request_id, None)) is not None:
                self._llm.output_processor.lora_states.request_finished(request_id, request.lora_name)

    def rest(self) -> None:
        """Show how many requests there are where no step follows, as after an abort."""
        self._record(self._llm.engine_core.engine_core.scheduler.make_stats(), None)

    def close(self) -> None:
        """Write no more, and remove the file."""
        self._is_over.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def _record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self._llm.output_processor.update_scheduler_stats(scheduler)
        self._llm.logger_manager.record(scheduler_stats=scheduler, iteration_stats=iteration)

    def _write(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):  # a full disk ends no engine
                write_to_textfile(str(self._file), self._families)
            self._is_over.wait(WRITE_S)
