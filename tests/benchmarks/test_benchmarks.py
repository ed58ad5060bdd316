"""Every script of benchmarks/ runs: in its smallest form, or, where it measures nothing but GPUs, up to a clear refusal."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from rlcore.gpu import detect_device

from .conftest import BENCHMARKS, Script  # type: ignore[import-not-found]

TRIED = {
    "adapters_together.py",
    "balancing.py",
    "cpu_step.py",
    "decode_steps.py",
    "driver_overhead.py",
    "generation.py",
    "grpo_step.py",
    "headline.py",
    "long_context.py",
    "phase_memory.py",
    "real_model.py",
    "refit.py",
    "replay.py",
    "residency.py",
    "train_step.py",
    "world_size.py",
}
needs_no_gpu = pytest.mark.skipif(detect_device() == "cuda", reason="with a GPU these scripts do their whole work")


def rows(output: str, *names: str) -> dict[str, list[str]]:
    """The figures of each line that begins so."""
    lines = {name: next((line for line in output.splitlines() if line.strip().startswith(name)), None) for name in names}
    assert None not in lines.values(), output
    return {name: re.findall(r"-?\d[\d,.]*", line.strip().removeprefix(name)) for name, line in lines.items() if line}


def test_every_script_is_tried() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts == TRIED


@pytest.mark.wide
def test_cpu_step(script: Script) -> None:
    output = script("cpu_step.py", "--quick", "--cases", "kl")
    if shutil.which("trl") is None:
        assert "TRL is not installed here" in output
    found = rows(output, "rlcore  ", "bare  ")
    assert all(float(figure) > 0 for figures in found.values() for figure in figures[:2])
    assert "rlcore by phase: total" in output


@pytest.mark.wide
def test_replay(script: Script) -> None:
    found = rows(script("replay.py", "--quick"), "run ", "replay ", "replay without rewards ")
    assert all(float(figures[0]) > 0 and float(figures[1]) > 0.1 for figures in found.values())
    assert found["replay "][3] == "0"


def test_balancing(script: Script) -> None:
    assert len(re.findall(r"512 +8 .* rlcore +0\.\d+%", script("balancing.py", "--quick"))) == 2


@pytest.mark.parametrize("num_turns", [1, 2])
def test_driver_overhead(script: Script, num_turns: int) -> None:
    figures = rows(script("driver_overhead.py", "--quick", "--turns", num_turns), "64 ")["64 "]
    assert all(float(figure) > 0 for figure in figures[:3])


@pytest.mark.wide
def test_world_size(script: Script) -> None:
    names = ("start-up, bytes", "step, driver", "refit, one rank", "store, operations")
    found = rows(script("world_size.py", "--ranks", "16", "64"), *names)
    assert [float(figures[-2]) for figures in found.values()] == pytest.approx([1.0, 1.0, 1.0, 1.0], abs=0.9)


@pytest.mark.wide
def test_adapters_together(script: Script) -> None:
    found = rows(script("adapters_together.py", "--quick"), "together", "by turns", "one adapter", "further adapter")
    assert all(float(figure.replace(",", "")) > 0 for name in ("together", "by turns", "one adapter") for figure in found[name])


@pytest.mark.wide
def test_train_step(script: Script) -> None:
    sides = ("fsdp2", "megatron", "plain transformers")
    losses = [
        float(figures[-1])
        for figures in rows(script("train_step.py", "--quick", "--steps", 1, "--sides", *sides), *sides).values()
    ]
    assert losses == pytest.approx([losses[0]] * 3, abs=0.01)


@pytest.mark.usefixtures("one_rank")
def test_long_context(script: Script, tmp_path: Path) -> None:
    arguments = ("--quick", "--gpus", 1, "--context", 1, "--lengths", 64, "--trainers", "fsdp2", "--model-directory", tmp_path)
    assert len(rows(script("long_context.py", *arguments), "fsdp2, 64 tokens, CP1")["fsdp2, 64 tokens, CP1"]) == 5


def test_grpo_step(script: Script, tmp_path: Path) -> None:
    arguments = ("--quick", "--device", "cpu", "--contestants", "rlcore", "--steps", 2, "--set", "generator.name=transformers")
    output = script("grpo_step.py", *arguments, "--model-directory", tmp_path)
    assert len(rows(output, "rlcore  ")["rlcore  "]) > 10


def test_headline(script: Script, tmp_path: Path) -> None:
    work = ("--prompts", 3, "--samples", 2, "--updates", 2, "--prompt-length", 50, "--length", 64)
    output = script(
        "headline.py", tmp_path / "results", "--quick", "--steps", 2, "--model-directory", tmp_path / "model", *work
    )
    recipe = tomllib.loads((tmp_path / "results" / "recipe.toml").read_text())
    assert (recipe["training"]["prompts_per_step"], recipe["training"]["minibatches_per_step"]) == (3, 2)
    lengths = {"samples_per_prompt": 2, "max_prompt_tokens": 50, "max_response_tokens": 14}
    assert recipe["rollout"] == {**lengths, "stop_token_ids": []}
    assert len(rows(output, "rlcore, means of 1 steps")["rlcore, means of 1 steps"]) >= 8
    assert float(rows(output, "most GiB in use, train:")["most GiB in use, train:"][0]) > 0.0
    idle = "idle share of a step, shared devices:"
    assert 0.0 < float(rows(output, idle)[idle][0]) < 100.0


@pytest.mark.parametrize(
    ("max_staleness", "steps_of_calls", "counted"),
    [
        (0, [4], [1, 2, 3]),
        (0, [2, 3], [1, 1, 2]),
        (0, [1], []),
        (1, [10], [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, [9], [1, 2, 3, 4, 5, 6]),
        (1, [4, 5], [1, 2, 1, 2]),
        (2, [6], [1, 2, 3]),
        (2, [5], []),
    ],
)
@pytest.mark.usefixtures("script")
def test_headline_counts_whole_cycles(
    max_staleness: int, steps_of_calls: list[int], counted: list[int], tmp_path: Path
) -> None:
    from headline import done_steps  # type: ignore[import-not-found]

    for call, num_steps in enumerate(steps_of_calls):
        (tmp_path / f"runs/call-{call:03}").mkdir(parents=True)
        records = [json.dumps({"step": step, "time/total_s": 1.0}) + "\n" for step in range(num_steps)]
        (tmp_path / f"runs/call-{call:03}/metrics.jsonl").write_text("".join(records))
    assert [step["step"] for step in done_steps(tmp_path, max_staleness)] == counted


@pytest.mark.wide
def test_generation_up_to_its_floor(script: Script) -> None:
    output = script("generation.py", "--quick", "--device", "cpu", "--rows", "floor")
    assert re.search(r"^floor .* tok/s|^floor +at [\d.]+ TB/s +\d", output, re.MULTILINE)


@pytest.mark.usefixtures("rows_here")
@pytest.mark.wide
def test_generation_by_a_stream(script: Script) -> None:
    row = "1 replica, in process, stream"
    output = script("generation.py", "--quick", "--device", "cpu", "--rows", row)
    assert float(rows(output, row)[row][0].replace(",", "")) > 0.0


@pytest.mark.usefixtures("rows_here")
@pytest.mark.wide
def test_refit(script: Script) -> None:
    output = script("refit.py", "--quick", "--device", "cpu", "--repeats", 2, "--rows", "in_process", "shards-fsdp2")
    for row in ("tiny  in_process ", "tiny  shards-fsdp2 "):
        assert len(rows(output, row)[row]) == 7


@pytest.mark.usefixtures("rows_here")
@pytest.mark.wide
def test_residency(script: Script) -> None:
    found = rows(script("residency.py", "--quick", "--device", "cpu", "--repeats", 1, "--rows", "discard"), "discard")
    assert len(found["discard"]) == 9


@pytest.mark.wide
def test_decode_steps(script: Script) -> None:
    found = rows(script("decode_steps.py", "--quick", "--device", "cpu", "--rows", "default"), "default")["default"]
    assert len(found) == 2
    assert all(float(figure) > 0 for figure in found)


@pytest.mark.wide
def test_real_model(script: Script, tmp_path: Path) -> None:
    figure, variants, results = tmp_path / "curves.svg", tmp_path / "variants.svg", tmp_path / "results"
    sides = ("fsdp2", "megatron", "trl", "staleness 1", "Dr.GRPO")
    options = ("--seeds", 0, "--together", 1, "--figure", figure, "--variants", variants)
    output = script("real_model.py", results, "--quick", "--device", "cpu", "--sides", *sides, *options)
    if shutil.which("trl") is None:
        assert "TRL is not installed here" in output
    for side, name in (
        ("fsdp2", "fsdp2-0"),
        ("megatron", "megatron-0"),
        ("staleness 1", "staleness-1-0"),
        ("Dr.GRPO", "drgrpo-0"),
    ):
        record = json.loads((results / f"{name}.json").read_text())
        assert record["side"] == side
        assert [one["step"] for one in record["held_out"]] == [0, 1, 2]
        assert record["held_out"][-1]["seconds"] == pytest.approx(sum(record["step_s"]))
        assert all(seconds > 0.0 for seconds in record["step_s"])
        assert len(rows(output, f"{side}  ")[f"{side}  "]) == 10
    assert all("<svg" in file.read_text() for file in (figure, variants))


@needs_no_gpu
@pytest.mark.parametrize(
    "arguments",
    [
        ("decode_steps.py",),
        ("generation.py",),
        ("grpo_step.py",),
        ("headline.py", "results"),
        ("long_context.py",),
        ("real_model.py", "results"),
        ("refit.py",),
        ("residency.py",),
        ("train_step.py",),
    ],
)
def test_without_a_gpu_a_script_for_one_says_so(script: Script, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        script(*arguments)


def test_memory_by_phase_needs_the_drivers_tool_on_a_gpu(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("rlcore.gpu.detect_device", lambda: "cuda")
    with pytest.raises(SystemExit, match="found no nvidia-smi"):
        script("phase_memory.py", "memory.json", "train", "recipe.toml")
    with pytest.raises(SystemExit, match="FILE and a command"):
        script("phase_memory.py")
