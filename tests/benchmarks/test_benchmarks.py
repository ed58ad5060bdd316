"""Every script of benchmarks/ runs: in its smallest form, or, where it measures nothing but GPUs, up to a clear refusal."""

import json
import re
import shutil
from pathlib import Path

import pytest

from rlcore.gpu import detect_device

from .conftest import BENCHMARKS, Script  # type: ignore[import-not-found]

TRIED = {
    "balancing.py",
    "batch_invariance.py",
    "cpu_step.py",
    "driver_overhead.py",
    "generation.py",
    "grpo_step.py",
    "headline.py",
    "large_plans.py",
    "long_context.py",
    "phase_memory.py",
    "plan_tables.py",
    "real_model.py",
    "refit.py",
    "refit_shards.py",
    "residency.py",
    "scale_sim.py",
    "slow_tools.py",
    "speculative.py",
    "train_step.py",
    "trainer_curves.py",
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


def test_cpu_step(script: Script) -> None:
    output = script("cpu_step.py", "--quick", "--cases", "kl")
    if shutil.which("trl") is None:
        assert "TRL is not installed here" in output
    found = rows(output, "rlcore  ", "bare  ")
    assert all(float(figure) > 0 for figures in found.values() for figure in figures[:2])
    assert "rlcore by phase: total" in output


def test_refit_shards(script: Script) -> None:
    arguments = ("--quick", "--device", "cpu", "--senders", "2", "--receivers", "2", "--tensor-parallel", "2")
    output = script("refit_shards.py", *arguments)
    found = rows(output, "gathered", "shards", "as read")
    assert all(float(figure) > 0 for figures in found.values() for figure in figures)
    assert {len(figures) for figures in found.values()} == {6}
    by_gathering, by_parts, as_read = (sum(float(figure) for figure in figures[2:4]) for figures in found.values())
    assert as_read == by_parts < by_gathering
    all_of_it, what_is_read = (sum(float(figure) for figure in found[way][4:]) for way in ("shards", "as read"))
    assert 0.4 < what_is_read / all_of_it < 0.6
    few, more, many = (float(rows(output, f"{share}% changed")[f"{share}% changed"][1]) for share in (0.1, 1.0, 10.0))
    assert 0 < few < more < many < by_parts


def test_batch_invariance(script: Script) -> None:
    found = rows(script("batch_invariance.py", "--quick", "--device", "cpu"), "ordinary", "batch invariant")
    assert all(float(figure.replace(",", "")) > 0 for figures in found.values() for figure in figures)
    assert {len(figures) for figures in found.values()} == {2}


def test_balancing(script: Script) -> None:
    assert len(re.findall(r"512 +8 .* rlcore +0\.\d+%", script("balancing.py", "--quick"))) == 2


@pytest.mark.parametrize("num_turns", [1, 2])
def test_driver_overhead(script: Script, num_turns: int) -> None:
    figures = rows(script("driver_overhead.py", "--quick", "--turns", num_turns), "64 ")["64 "]
    assert all(float(figure) > 0 for figure in figures[:3])


def test_slow_tools(script: Script) -> None:
    tables = script("slow_tools.py", "--quick").split("with one tool")
    found = rows(tables[0], "lockstep ", "rlcore, staleness 0", "rlcore, staleness 1", "tools at once")
    assert {len(figures) for figures in found.values()} == {5}
    found = rows(tables[1], "staleness 0", 'staleness 1, "wait"', 'staleness 1, "drop"', 'staleness 1, "rescore"')
    assert {len(figures) for figures in found.values()} == {4}


def test_scale_sim(script: Script) -> None:
    assert len(rows(script("scale_sim.py", "--quick"), "8 ")["8 "]) > 10


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
    output = script("headline.py", tmp_path / "results", "--quick", "--steps", 2, "--model-directory", tmp_path / "model")
    assert len(rows(output, "rlcore, medians of 1 steps")["rlcore, medians of 1 steps"]) >= 8
    assert float(rows(output, "most GiB in use, train:")["most GiB in use, train:"][0]) > 0.0
    idle = "idle share of a step, shared devices:"
    assert 0.0 < float(rows(output, idle)[idle][0]) < 100.0


def test_generation_up_to_its_floor(script: Script) -> None:
    output = script("generation.py", "--quick", "--device", "cpu", "--rows", "floor")
    assert re.search(r"^floor .* tok/s|^floor +at [\d.]+ TB/s +\d", output, re.MULTILINE)


@pytest.mark.usefixtures("rows_here")
def test_generation_by_a_stream(script: Script) -> None:
    row = "1 replica, in process, stream"
    output = script("generation.py", "--quick", "--device", "cpu", "--rows", row)
    assert float(rows(output, row)[row][0].replace(",", "")) > 0.0


@pytest.mark.usefixtures("rows_here")
def test_speculative(script: Script) -> None:
    row = "draft_model"
    found = rows(script("speculative.py", "--quick", "--device", "cpu", "--batches", 2, "--rows", row), row)[row]
    assert float(found[-1]) <= 1e-3, "the log-probabilities are not the model's"
    assert float(found[-2]) > 1.3, "what the drafter guesses is not accepted"


@pytest.mark.usefixtures("rows_here")
def test_refit(script: Script) -> None:
    output = script("refit.py", "--quick", "--device", "cpu", "--repeats", 2, "--rows", "in_process")
    assert len(rows(output, "tiny  in_process ")["tiny  in_process "]) == 6


@pytest.mark.usefixtures("rows_here")
def test_residency(script: Script) -> None:
    found = rows(script("residency.py", "--quick", "--device", "cpu", "--repeats", 1, "--rows", "discard"), "discard")
    assert len(found["discard"]) == 9


def test_real_model(script: Script, tmp_path: Path) -> None:
    figure = tmp_path / "curves.svg"
    output = script("real_model.py", tmp_path / "results", "--quick", "--device", "cpu", "--seeds", 0, "--figure", figure)
    if shutil.which("trl") is None:
        assert "TRL is not installed here" in output
    for side in ("fsdp2", "megatron"):
        record = json.loads((tmp_path / "results" / f"{side}-0.json").read_text())
        assert [one["step"] for one in record["held_out"]] == [0, 1, 2]
        assert record["held_out"][-1]["seconds"] == pytest.approx(sum(record["step_s"]))
        assert all(seconds > 0.0 for seconds in record["step_s"])
        assert len(rows(output, side)[side]) == 7
    assert "<svg" in figure.read_text()


def test_trainer_curves(script: Script, tmp_path: Path) -> None:
    folder = tmp_path / "demo-seed0" / "grpo"
    folder.mkdir(parents=True)
    lines = [{"step": step, "reward_mean": step / 20, "evaluation/pass@1": 0.5} for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script("trainer_curves.py", tmp_path / "curves.svg", f"mine={tmp_path}")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


@needs_no_gpu
@pytest.mark.parametrize(
    "arguments",
    [
        ("batch_invariance.py",),
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


def test_large_plans_are_those_of_the_document(script: Script) -> None:
    """Tensor ranks stay within a machine, experts are divided before stages are made, and more GPUs fit what fewer do."""
    lines = script("large_plans.py").splitlines()
    assert "\n".join(lines) in (BENCHMARKS.parent / "docs" / "megatron.md").read_text()
    fits: dict[tuple[str, str, int], bool] = {}
    for line in lines[2:]:
        name, _, length, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for column, cell in enumerate(cells):
            sizes = {key: int(size) for key, size in re.findall(r"([A-Z]P)(\d+)", cell)}
            assert sizes.get("TP", 1) <= 8
            assert name.startswith("Llama") or "EP" in sizes or cell == "does not fit"
            key = name, length, column
            assert bool(sizes) >= fits.get(key, False), line
            fits[key] = bool(sizes)
    assert sum(fits.values()) == len(fits) == 18


def test_plans_are_those_of_the_document_and_near_what_was_measured(script: Script) -> None:
    """Each row of docs/plan.md's tables, by the commands that write them; seconds within 25%, memory within 10%."""
    import measured_plans  # type: ignore[import-not-found]

    printed = script("plan_tables.py").splitlines()
    document = (BENCHMARKS.parent / "docs" / "plan.md").read_text().splitlines()
    assert [line for line in printed if line and line not in document] == []
    assert len({(row.shape, row.gpus, str(row.config)) for row in measured_plans.MEASURED}) >= 6
    for row in measured_plans.MEASURED:
        seconds, size = row.predicted()
        assert seconds == pytest.approx(row.step_s, rel=0.25), row.name
        assert row.peak_gb is None or size == pytest.approx(row.peak_gb, rel=0.10), row.name


def test_large_plans_are_of_models_as_large_as_they_say(script: Script) -> None:
    """Counted in their papers, in billions."""
    import large_plans  # type: ignore[import-not-found]

    from rlcore_megatron.layouts.memory import Parameters
    from rlcore_megatron.setup.config import MegatronConfig
    from rlcore_torchkit.architectures.dims import ModelDims

    one = MegatronConfig(tensor_parallel=1, pipeline_parallel=1, context_parallel=1, expert_parallel=1)
    for name, billions in {"Llama-3.1-405B": 405.9, "Qwen3-235B-A22B": 235.1, "DeepSeek-V3": 671.0}.items():
        dims = ModelDims.of(large_plans.MODELS[name])
        assert dims is not None
        assert Parameters.of(dims, one).total == pytest.approx(billions * 1e9, rel=1e-3)
