"""A run whose checkpoints programs measure through a real server: one in a few lines, and the harnesses that documents name.

The harnesses are asked as docs/lm-evaluation-harness.md and docs/inspect.md say. They run where RLCORE_HARNESS_PYTHON names a
Python of an environment with `lm-eval[api]` and `inspect-ai`, whose dependencies are other versions than those of the tests.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.run.storage.run_directory import RunDirectory
from rlcore_torchkit.testing.models import make_model

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("RLCORE_HARNESS_PYTHON")
HARNESS = pytest.mark.skipif(PYTHON is None, reason="RLCORE_HARNESS_PYTHON names no Python with lm-eval and inspect-ai")
RECIPE = """
extends = "page.toml"
[run]
num_steps = 2
device = "cpu"
[model]
path = "model"
chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
[algorithm]
name = "grpo"
[environment]
name = "arithmetic"
[training]
prompts_per_step = 2
[rollout]
samples_per_prompt = 2
max_prompt_tokens = 8
max_response_tokens = 4
[trainer]
name = "fsdp2"
[generator]
name = "transformers"
[sinks]
names = ["tensorboard"]
"""
ASK = """
import json, sys, urllib.request
url, model = sys.argv[1:]
body = json.dumps({"model": "policy", "prompt": "2+2=", "max_tokens": 4, "temperature": 0}).encode()
request = urllib.request.Request(url + "/completions", body, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
answer = json.load(opener.open(request))
print(json.dumps({"tokens": answer["usage"]["completion_tokens"], "model": model}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs are started: a model, a recipe without its page, and questions."""
    make_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    questions = [{"question": f"{one}+{other}=", "answer": str(one + other)} for one in range(3) for other in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def figures_of_run(folder: Path, page: str, *overrides: str) -> tuple[dict[str, float], str]:
    """What was measured of the run's last step, and what the run said."""
    (folder / "page.toml").write_text(page)
    result = CliRunner().invoke(cli, ["train", str(folder / "recipe.toml"), f"run.directory={folder}", *overrides])
    assert result.exit_code == 0, result.output
    last = RunDirectory(path=folder / "run").read_metrics()[-1]
    assert last["step"] == 2
    return {name: value for name, value in last.items() if name.startswith("checkpoint_eval/")}, result.output


def test_a_program_asks_the_server_for_the_model_of_a_checkpoint(folder: Path) -> None:
    (folder / "ask.py").write_text(ASK)
    command = json.dumps([sys.executable, "-S", "ask.py", "{url}", "{model}"])
    figures, said = figures_of_run(folder, f"[checkpoint_evaluation]\ncommand = {command}\nserve = true\n")
    assert figures == {"checkpoint_eval/tokens": 4.0}, said
    assert "evaluation of the checkpoint of step 2: checkpoint_eval/tokens 4" in said
    log = (folder / "run" / "evaluations" / "step-000002" / "server.log").read_text()
    assert "with transformers" in log


def section_of(document: str) -> str:
    """The page's recipe, with the harness of the environment that is named."""
    from markdown_blocks import blocks  # type: ignore[import-not-found]

    assert PYTHON is not None
    page = next(block.text for block in blocks(ROOT / "docs" / document) if "serve = true" in block.text)
    for program in ("lm_eval", "inspect"):
        page = page.replace(f'    "{program}", ', f'    "{Path(PYTHON).with_name(program)}", ')
    return page.replace("every_n_steps = 20", "every_n_steps = 2")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The blocks of documents."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "docs"))
    import markdown_blocks

    return markdown_blocks


@HARNESS
def test_the_language_model_evaluation_harness_measures_a_checkpoint(folder: Path, pages: Any) -> None:
    (folder / "tasks").mkdir()
    [task] = [block.text for block in pages.blocks(ROOT / "docs" / "lm-evaluation-harness.md") if block.language == "text"]
    (folder / "tasks" / "sums.yaml").write_text(task)
    figures, said = figures_of_run(folder, section_of("lm-evaluation-harness.md"))
    assert 0 <= figures["checkpoint_eval/sums/exact_match,none"] <= 1, said
    assert figures["checkpoint_eval/sums/sample_len"] == 9


@HARNESS
def test_inspect_measures_a_checkpoint(folder: Path, pages: Any) -> None:
    assert pages.write_files(ROOT / "docs" / "inspect.md", folder) == [folder / "sums.py"]
    figures, said = figures_of_run(folder, section_of("inspect.md"))
    assert 0 <= figures["checkpoint_eval/accuracy/value"] <= 1, said
    assert "checkpoint_eval/stderr/value" in figures


@HARNESS
def test_a_task_of_log_likelihoods_is_measured_without_a_server(folder: Path, pages: Any) -> None:
    (folder / "tasks").mkdir()
    [task] = [block.text for block in pages.blocks(ROOT / "docs" / "lm-evaluation-harness.md") if block.language == "text"]
    head = task.partition("output_type")[0]
    choice = (
        "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_target: answer\ndoc_to_choice: ['0', '1', '2', '3', '4']\n"
    )
    (folder / "tasks" / "sums.yaml").write_text(f"{head}{choice}metric_list:\n  - metric: acc\n")
    [page] = [
        block.text for block in pages.blocks(ROOT / "docs" / "lm-evaluation-harness.md") if 'pretrained={model}"' in block.text
    ]
    page = page.replace('"lm_eval"', f'"{Path(str(PYTHON)).with_name("lm_eval")}"').replace(
        '"arc_easy"', '"sums", "--include_path", "tasks"'
    )
    page = page.replace('CUDA_VISIBLE_DEVICES = "7"', 'CUDA_VISIBLE_DEVICES = ""')
    figures, said = figures_of_run(folder, page)
    assert 0 <= figures["checkpoint_eval/sums/acc,none"] <= 1, said
