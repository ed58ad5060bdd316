"""`rlcore check` opens what a run will read: the rows are counted, and the first prompt is the one that the model will see."""

import json
from pathlib import Path

import pytest

from .system_support import Workplace, expect_failure, write_jsonl  # type: ignore[import-not-found]

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a in range(4) for b in range(3)]
CHAT = [{**row, "prompt": [{"role": "system", "content": "12"}, {"role": "user", "content": row["prompt"]}]} for row in ROWS]


def source(split: str, name: str) -> tuple[str, str]:
    return f"data.{split}.source=jsonl", f"data.{split}.path={name}"


def test_it_counts_rows_and_shows_the_first_prompt(workplace: Workplace) -> None:
    result = workplace.rlcore("check", "grpo.toml", "data.train.shuffle=false")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert "  train data    60 rows of the environment\n  held-out data 8 rows of the environment\n" in result.stdout
    shown = result.stdout.partition("  first prompt\n    | ")[2]
    first, second = shown[0], shown[2]
    answer = int(first) + int(second)
    assert shown == f"{first}+{second}=\n  answer\n    | '{answer}'\n  completion\n    | '{answer}'\n"


def test_a_table_of_another_algorithm_is_told(workplace: Workplace) -> None:
    """Options of a preset are below its own name; what a file has that the recipe extends was for the algorithm there."""
    for command in ("check", "train"):
        result = workplace.rlcore(
            command, "grpo.toml", "algorithm.grpo.clip_high=0.3", "run.num_steps=1", "algorithm.name=dr_grpo"
        )
        assert result.exit_code == 0, result.stderr
        told = 'algorithm.grpo: is not read: algorithm.name is "dr_grpo", whose options are below [algorithm.dr_grpo]'
        assert (result.stdout + result.stderr).count(told) == 1
    recipe = workplace.folder / "grpo.toml"
    recipe.write_text(recipe.read_text() + "[algorithm.grpo]\nclip_high = 0.3\n[algorithm.dapo]\nclip_low = 0.1\n")
    assert workplace.rlcore("check", "grpo.toml").stderr.count("note: algorithm.dapo: is not read") == 1
    assert workplace.rlcore("check", "sft.toml").stderr == ""


def test_greedy_answers_are_cut_by_nothing(workplace: Workplace) -> None:
    result = workplace.rlcore("check", "grpo.toml", "evaluation.top_p=0.9", "evaluation.top_k=2")
    expect_failure(result, 2, "evaluation.top_p: found 0.9, with temperature = 0.0", "evaluation.top_k: found 2, with temp")
    assert workplace.rlcore("check", "grpo.toml", "evaluation.top_p=0.9", "evaluation.temperature=0.7").exit_code == 0


def test_chat_goes_through_the_models_template(workplace: Workplace) -> None:
    write_jsonl(workplace.folder / "chat.jsonl", CHAT)
    template = "{% for message in messages %}{{ message.content }}*{% endfor %}{% if brief %}={% endif %}"
    arguments = (*source("train", "chat.jsonl"), "rollout.max_prompt_tokens=40", f'model.chat_template="{template}"')
    result = workplace.rlcore("check", "sft.toml", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "12 rows of " in result.stdout
    assert result.stdout.endswith("  first prompt\n    | 12*0+0=*\n  to learn\n    | 0*<|end|>\n")
    brief = workplace.rlcore("check", "sft.toml", *arguments, "model.chat_template_kwargs={brief=true}")
    assert "  first prompt\n    | 12*0+0=*=\n" in brief.stdout


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_data_that_is_not_there_or_damaged_fails(workplace: Workplace, split: str) -> None:
    expect_failure(workplace.rlcore("check", "grpo.toml", *source(split, "no.jsonl")), 4, f"data.{split}.path: found no file")
    (workplace.folder / "bad.jsonl").write_bytes(b'{"prompt": "1+1=", "answer": "2"}\n{"prompt": "\\ud800", "answer": "2"}\n')
    result = workplace.rlcore("check", "grpo.toml", *source(split, "bad.jsonl"))
    expect_failure(result, 4, f"data.{split}.path: ", "bad.jsonl, line 2 holds half a character")


def test_prompts_over_the_limit_are_found_or_counted(workplace: Workplace) -> None:
    write_jsonl(workplace.folder / "data.jsonl", [*ROWS, {"prompt": "1+1+1+1+1=", "answer": "5"}])
    arguments = ("check", "grpo.toml", *source("train", "data.jsonl"))
    expect_failure(workplace.rlcore(*arguments), 4, "row 12 (the first is 0; line 13 of the file) has a prompt of 10 tokens")
    result = workplace.rlcore(*arguments, "data.train.on_long_prompt=drop")
    assert "data.jsonl, of which 1 are over the limits and left out" in result.stdout


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_held_out_prompts_that_are_trained_on_are_counted(workplace: Workplace, command: str) -> None:
    write_jsonl(workplace.folder / "data.jsonl", ROWS)
    write_jsonl(workplace.folder / "held.jsonl", [ROWS[0], {"prompt": "9+9=", "answer": "18"}, ROWS[5], ROWS[5]])
    arguments = (command, "grpo.toml", *source("train", "data.jsonl"), *source("evaluation", "held.jsonl"), "run.num_steps=1")
    expected = "data.evaluation: 3 of 4 held-out prompts are in data.train too"
    expect_failure(workplace.rlcore(*arguments, "data.on_overlap=error"), 4, f"{expected}; expected none (data.on_overlap)")
    result = workplace.rlcore(*arguments)
    assert result.exit_code == 0
    assert f"{expected}, so that evaluations" in result.stderr + result.stdout


def test_a_model_of_the_hub_is_not_fetched(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = workplace.rlcore("check", "grpo.toml", "model.path=no-such/model")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "note: model.path: the tokenizer of no-such/model is on the Hub, so that no prompt was made\n"
    assert "60 rows of the environment" in result.stdout
    assert "first prompt" not in result.stdout


def test_a_tokenizer_that_does_not_load_is_found(workplace: Workplace, model: Path) -> None:
    import shutil

    shutil.copytree(model, workplace.folder / "odd")
    (workplace.folder / "odd" / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    expect_failure(workplace.rlcore("check", "grpo.toml", "model.path=odd"), 5, "odd with a tokenizer that does not load")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("rollout.top_p=0.9",), "sampling_mask"),
        (("lora.rank=2", "refit.adapters=unmerged"), "adapter_refit"),
    ],
)
def test_what_vllm_lacks_where_it_guesses_is_asked_of_it_in_vain(
    workplace: Workplace, options: tuple[str, ...], what: str
) -> None:
    guesses = ("generator.name=vllm", "generator.vllm.speculative_ngram=2", "generator.vllm.cpu_kv_cache_gib=0.1")
    result = workplace.rlcore("check", "grpo.toml", *guesses, *options)
    expect_failure(result, 3, "lacks the capability", f"[generator.vllm] takes '{what}' away")
