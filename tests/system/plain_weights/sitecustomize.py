"""Has vLLM's engines of a run on a CPU keep weights as a checkpoint has them. No recipe can name an extension of workers."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

EXTENDED = "rlcore_vllm.ranks.worker"


class Extending(MetaPathFinder):
    """Puts the tests' extension in the place of rlcore's once that is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != EXTENDED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            from vllm_plain_weights import PlainWeights  # type: ignore[import-not-found]

            module.WorkerExtension = PlainWeights

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Extending())
