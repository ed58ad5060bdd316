"""Peak memory and time of token log-probabilities, forward and backward: chunked against full logits.

Run `python benchmarks/logprobs_memory.py [--device cpu|cuda] [--repeats 3]`, or with `--quick` to try the script. Every case
runs in a process of its own, so that peaks do not mix; on CPU the peak is the resident set's, on CUDA that of torch's
allocator. Both are given above what the inputs and their gradients take, which no method avoids. The floor is three matrix
products (forward, both gradients) at the rate measured beside.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import click
from attrs import asdict, frozen
from model_shapes import require_device


@frozen
class Shape:
    """The head's input and size."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: str

    @property
    def product_flops(self) -> int:
        """FLOPs of one matrix product: logits, or one of the two gradients."""
        return 2 * self.tokens * self.vocabulary * self.hidden


SHAPES = {"cpu": Shape(4096, 32_000, 256, "float32"), "cuda": Shape(8192, 151_936, 1536, "bfloat16")}
QUICK = Shape(256, 1000, 32, "float32")
CASES = [(method, entropy) for entropy in ("none", "loss") for method in ("plain", "chunked")]


def plain_logprobs(hidden: Any, weight: Any, targets: Any, *, temperature: float, entropy: str) -> tuple[Any, Any]:
    """The usual form: all logits, in float32, at once."""
    log_softmax = ((hidden @ weight.T).float() / temperature).log_softmax(1)
    logprobs = log_softmax.gather(1, targets[:, None])[:, 0]
    return logprobs, -(log_softmax.exp() * log_softmax).sum(1) if entropy == "loss" else None


def make_inputs(shape: Shape, device: str) -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    return hidden, weight, torch.randint(shape.vocabulary, (shape.tokens,), device=device)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seconds_of(function: Any, device: str) -> float:
    import torch

    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def product_rate(hidden: Any, weight: Any, device: str) -> float:
    """FLOP/s of the head's product over at most 1,024 rows, so that it does not set the peak."""
    rows = hidden.detach()[:1024]
    flops = 2 * rows.shape[0] * weight.numel()
    return flops / min(seconds_of(lambda: rows @ weight.detach().T, device) for _ in range(5))


def run_case(device: str, shape: Shape, method: str, entropy: str, repeats: int) -> dict[str, float]:
    """Peak above the inputs, seconds of forward and backward (median), and the rate of a plain product."""
    from rlcore_torchkit.head.logprobs import token_logprobs

    compute = plain_logprobs if method == "plain" else token_logprobs
    hidden, weight, targets = make_inputs(shape, device)

    def step() -> None:
        logprobs, entropies = compute(hidden, weight, targets, temperature=0.9, entropy=entropy)
        (logprobs.sum() if entropies is None else logprobs.sum() + 0.01 * entropies.sum()).backward()

    before = peak_bytes(device)
    seconds_of(step, device)
    seconds = [seconds_of(step, device) for _ in range(repeats)]
    peak = peak_bytes(device) - before
    return {"peak_bytes": peak, "seconds": statistics.median(seconds), "rate": product_rate(hidden, weight, device)}


def report(device: str, shape: Shape, results: list[tuple[str, str, dict[str, float]]]) -> None:
    rate = max(result["rate"] for *_, result in results)
    floor_s = 3 * shape.product_flops / rate
    logits_mib = shape.tokens * shape.vocabulary * 4 / 2**20
    print(f"\n{device}: " + ", ".join(f"{name} {value}" for name, value in asdict(shape).items()))
    print(f"floor: 3 products of {shape.product_flops / 1e12:.2f} TFLOP at {rate / 1e12:.2f} TFLOP/s = {floor_s:.3f} s; 0 MiB")
    print(f"float32 logits alone: {logits_mib:,.0f} MiB")
    print("| method | entropy | peak above inputs and gradients, MiB | forward + backward, s | × floor |")
    print("|---|---|---|---|---|")
    for method, entropy, result in results:
        peak, seconds = result["peak_bytes"] / 2**20, result["seconds"]
        print(f"| {method} | {entropy} | {peak:,.0f} | {seconds:.3f} | {seconds / floor_s:.2f} |")


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: CPU, and CUDA where there is one.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--case", nargs=2, hidden=True, default=None, help="Run one case and print its figures as JSON.")
@click.option("--quick", is_flag=True, help="A tiny shape, to try the script.")
def main(device: str | None, repeats: int, case: tuple[str, str] | None, quick: bool) -> None:
    """Print one table a device."""
    if case is not None:
        print(json.dumps(run_case(device or "cpu", QUICK if quick else SHAPES[device or "cpu"], *case, repeats)))
        return
    if device == "cuda":
        require_device(device)
    for each in [device] if device else available_devices():
        results = []
        for method, entropy in CASES:
            command = [sys.executable, __file__, "--device", each, "--repeats", str(repeats), "--case", method, entropy]
            command += ["--quick"] if quick else []
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append((method, entropy, json.loads(output.splitlines()[-1])))
        report(each, QUICK if quick else SHAPES[each], results)


def available_devices() -> list[str]:
    """Asked of another process: what this one holds would count in its children's peaks."""
    code = "import torch; print(torch.cuda.is_available())"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return ["cpu", "cuda"] if answer == "True" else ["cpu"]


if __name__ == "__main__":
    main()
