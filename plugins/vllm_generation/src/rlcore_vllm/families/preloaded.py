"""Imports of vLLM that every engine needs, for the server that trials on a CPU are forked from."""

import contextlib
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from rlcore_vllm.engines import versions

versions.import_without_torchao()
with contextlib.suppress(ImportError):
    import vllm.model_executor.models.transformers
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
