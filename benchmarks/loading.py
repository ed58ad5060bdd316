"""Memory and time of loading the trainer `fsdp2` on several ranks of a CPU: each its parts, against the whole model on each.

Run `python benchmarks/loading.py [--ranks 2] [--layout tensor_parallel=2]`. Weights are random, in bfloat16, and become float32
master weights. Memory is the anonymous part of a rank's resident set, which leaves out the pages of files that it reads, above
what the rank held before; the peak is looked at every 2 ms. The floor is the rank's share of the parameters. What is read
of the files is that of all ranks together, whose floor is the files' size.
"""

import json
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import torch

MIB = 2**20
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 3072, "num_hidden_layers": 6},
    "qwen3_moe": {
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
    },
}
COMMON: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


class Memory(threading.Thread):
    """Watches this process's anonymous memory from `start` until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = anonymous_bytes()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def stop(self) -> tuple[int, int]:
        """Bytes above those at the start: at the peak, and left."""
        self._ended.set()
        self.join()
        return self.peak - self.before, anonymous_bytes() - self.before


def anonymous_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def make_model(directory: Path, architecture: str, **changed: int) -> int:
    """Write a model with random weights; returns its number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlcore.testing.models import make_tokenizer

    make_tokenizer(directory)
    config = AutoConfig.for_model(architecture, **COMMON, **SHAPES[architecture] | changed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def load(rank: int, num_ranks: int, directory: Path, port: int, options: dict[str, int], way: str) -> None:
    """One rank: load, and write what it took."""
    from rlcore.spi import ModelSpec, RankInfo
    from rlcore_fsdp2.config import Fsdp2Config
    from rlcore_fsdp2.layout import ParallelLayout
    from rlcore_fsdp2.policy import make_policy
    from rlcore_torchkit.distributed import process_group
    from rlcore_torchkit.huggingface.models import load_model
    from rlcore_torchkit.huggingface.safetensors_files import TensorFiles

    torch.set_num_threads(1)
    spec, config = ModelSpec(path=str(directory), dtype="bfloat16"), Fsdp2Config(**options)
    process_group.join(RankInfo(rank=rank, world_size=num_ranks, rendezvous=f"tcp://127.0.0.1:{port}"), 60.0)
    meshes = ParallelLayout.of(config, rank, num_ranks).meshes("cpu")
    load_model(spec, dtype=torch.float32, device="meta")  # imports what any way of loading imports
    torch.distributed.barrier()
    num_read, read = [0], TensorFiles.read

    def counted(files: TensorFiles, name: str, bounds: Any) -> torch.Tensor:
        block = read(files, name, bounds)
        num_read[0] += block.nbytes
        return block

    TensorFiles.read = counted  # type: ignore[method-assign]
    memory, began = Memory(), time.perf_counter()
    memory.start()
    if way == "whole":
        model = load_model(spec, dtype=torch.float32)
        num_read[0] = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    else:
        model, _ = make_policy(spec, config, meshes, torch.device("cpu"))
    took_s = time.perf_counter() - began
    peak, left = memory.stop()
    (directory / f"{way}-{rank}.json").write_text(json.dumps({"peak": peak, "left": left, "s": took_s, "read": num_read[0]}))
    del model
    torch.distributed.barrier()
    process_group.leave()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@click.command()
@click.option("--ranks", "num_ranks", default=2, show_default=True)
@click.option("--architecture", type=click.Choice(list(SHAPES)), default="qwen3", show_default=True)
@click.option("--layout", multiple=True, metavar="KEY=N", help="An option of [trainer.fsdp2]; may be repeated.")
@click.option("--quick", is_flag=True, help="A model of one layer, to try the script.")
def main(num_ranks: int, architecture: str, layout: tuple[str, ...], quick: bool) -> None:
    options = {key: int(number) for key, number in (item.split("=") for item in layout)}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        size = make_model(directory, architecture, **({"num_hidden_layers": 1} if quick else {})) * 4
        print(f"{architecture}, {size / 4e6:.0f}M parameters, {num_ranks} ranks {options or ''}; a rank's share: ", end="")
        print(f"{size / num_ranks / MIB:,.0f} MiB of {size / MIB:,.0f}\n")
        print("| each rank loads | peak MiB | left MiB | read MiB | s |")
        print("|---|---|---|---|---|")
        for way in ("whole", "parts"):
            arguments = (num_ranks, directory, free_port(), options, way)
            torch.multiprocessing.spawn(load, arguments, nprocs=num_ranks)
            found = [json.loads((directory / f"{way}-{rank}.json").read_text()) for rank in range(num_ranks)]
            peak, left = (max(each[key] for each in found) / MIB for key in ("peak", "left"))
            read_mib = sum(each["read"] for each in found) / MIB
            took_s = statistics.median(each["s"] for each in found)
            name = "the whole model" if way == "whole" else "its parts"
            print(f"| {name} | {peak:,.0f} | {left:,.0f} | {read_mib:,.0f} | {took_s:.2f} |")


if __name__ == "__main__":
    main()
