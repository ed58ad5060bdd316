"""Data sets of every source through whole runs: files, a local Hub directory, chats, mathematics."""

import json
from pathlib import Path

import pandas
import pytest

from rlcore_torchkit.testing.models import make_model

from .system_support import Workplace, read_metrics, write_jsonl  # type: ignore[import-not-found]

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b), "solution": str(a + b)} for a in range(5) for b in range(4)]
PROBLEMS = [
    {
        "question": f"Tom has {a} pens and gets {b} more. How many?",
        "answer": f"Tom has {a}+{b}=<<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}",
    }
    for a in range(1, 5)
    for b in range(1, 4)
]
MATH = """
[run]
name = "math"
num_steps = 3
[model]
path = "{model}"
[algorithm]
name = "grpo"
[environment]
name = "math"
[environment.math]
instruction = "{{problem}} Answer with a number."
system_prompt = "You count."
num_processes = 1
[data.train]
source = "jsonl"
path = "gsm.jsonl"
prompt_field = "question"
[data.evaluation]
source = "jsonl"
path = "gsm.jsonl"
prompt_field = "question"
limit = 2
[rollout]
samples_per_prompt = 8
max_prompt_tokens = 128
max_response_tokens = 6
[training]
prompts_per_step = 4
[optimizer]
learning_rate = 1e-2
[logging]
rollouts_every_n_steps = 1
"""


@pytest.mark.parametrize("recipe", ["grpo.toml", "sft.toml"])
def test_the_same_rows_from_every_source_give_the_same_run(workplace: Workplace, recipe: str) -> None:
    write_jsonl(workplace.folder / "rows.jsonl", ROWS)
    pandas.DataFrame(ROWS).to_parquet(workplace.folder / "rows.parquet")
    (workplace.folder / "hub").mkdir()
    write_jsonl(workplace.folder / "hub" / "train.jsonl", ROWS)
    fields = ("data.train.prompt_field=question", "data.train.completion_field=solution", "data.train.limit=17")
    for source, path in (("jsonl", "rows.jsonl"), ("parquet", "rows.parquet"), ("huggingface", "./hub")):
        source_is = (f"data.train.source={source}", f"data.train.path={path}", f"run.name={source}")
        result = workplace.rlcore("train", recipe, *source_is, *fields)
        assert result.exit_code == 0, result.stderr
    first, *others = [read_metrics(workplace.run(name)) for name in ("jsonl", "parquet", "huggingface")]
    assert all(other == first for other in others)
    assert first[-1]["step"] == 4


def test_mathematics_from_a_file_with_a_chat_template(workplace: Workplace) -> None:
    model = make_model(workplace.folder / "words", "qwen3", max_length=256)
    write_jsonl(workplace.folder / "gsm.jsonl", PROBLEMS)
    (workplace.folder / "math.toml").write_text(MATH.format(model=model))
    run = workplace.train("math.toml")
    samples = pandas.concat(pandas.read_parquet(path) for path in sorted((run / "rollouts").glob("step-*")))
    questions = {row["question"]: row["answer"].split()[-1] for row in PROBLEMS}
    for prompt in samples["prompt"]:
        first, second, last = prompt.splitlines()
        assert (first, last) == ("system: You count.", "assistant: ")
        assert second.removeprefix("user: ").removesuffix(" Answer with a number.") in questions
    assert set(samples["reward"]) <= {0.0, 1.0}
    answers = [
        questions[prompt.splitlines()[1].removeprefix("user: ").removesuffix(" Answer with a number.")]
        for prompt in samples["prompt"]
    ]
    rewarded = [
        (answer, text) for answer, text, reward in zip(answers, samples["response"], samples["reward"], strict=True) if reward
    ]
    assert all(answer in text for answer, text in rewarded)
    records = read_metrics(run)
    assert records[-1]["environment/failed"] == 0
    assert records[-1]["environment/verification_failed"] == 0
    assert records[-1]["environment/answered"] > 0
    assert 0 <= records[-1]["eval/pass@1"] <= 1


def test_chats_and_a_template_of_the_recipe(workplace: Workplace) -> None:
    """The recipe's template, which adds nothing that this small alphabet cannot say, takes the place of the model's."""
    rows = [{"messages": [{"role": "user", "content": f"{a}+{a}"}], "answer": str(2 * a)} for a in range(5)]
    write_jsonl(workplace.folder / "chats.jsonl", rows)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    arguments = (
        "data.train.source=jsonl",
        "data.train.path=chats.jsonl",
        "data.train.prompt_field=messages",
        "logging.rollouts_every_n_steps=1",
    )
    run = workplace.train("grpo.toml", *arguments, f"model.chat_template={json.dumps(template)}")
    samples = pandas.read_parquet(run / "rollouts" / "step-000001.parquet")
    assert set(samples["prompt"]) <= {f"{a}+{a}=" for a in range(5)}
    assert samples["prompt"].nunique() == 4


def test_data_paths_start_from_the_recipe_that_names_them(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(workplace.folder / "rows.jsonl", [{"prompt": row["question"], "answer": row["answer"]} for row in ROWS])
    (workplace.folder / "data.toml").write_text('extends = "grpo.toml"\n[data.train]\nsource = "jsonl"\npath = "rows.jsonl"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = workplace.rlcore("train", "../data.toml", "run.num_steps=1")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "elsewhere" / "runs" / "run" / "metrics.jsonl").exists()
