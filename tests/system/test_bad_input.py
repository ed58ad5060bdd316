"""Wrong recipes, data, models and installations: one clear message, the documented exit code, and nothing made."""

import json
import shutil
from pathlib import Path

import pandas
import pytest

from .system_support import Workplace, expect_failure, write_jsonl  # type: ignore[import-not-found]

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3)]


def refuse(workplace: Workplace, exit_code: int, parts: tuple[str, ...], *overrides: str, recipe: str = "grpo.toml") -> str:
    """`rlcore train` ends with this message and has made no run directory."""
    message: str = expect_failure(workplace.rlcore("train", recipe, *overrides), exit_code, *parts)
    assert not (workplace.folder / "runs").exists()
    return message


# The recipe


@pytest.mark.parametrize("command", ["train", "check", "eval", "config"])
def test_unknown_keys_and_wrong_types_are_reported_at_once(workplace: Workplace, command: str) -> None:
    overrides = [
        "training.prompt_per_step=3",
        "run.num_steps=many",
        "optimizer.lr=1",
        "trainer.fsdp2.optimizer.eps=1",
        "model.trust_remote_code=1",
    ]
    message = expect_failure(
        workplace.rlcore(command, "grpo.toml", *overrides),
        2,
        "5 problem(s) in the recipe",
        "training.prompt_per_step: found an unknown key, from the command line",
        "Did you mean training.prompts_per_step?",
        'run.num_steps: found "many" (a string), from the command line; expected an integer',
        "optimizer.lr: found an unknown key",
        "trainer.fsdp2.optimizer: found an unknown key",
        "Did you mean [optimizer]",
        "model.trust_remote_code: found 1 (an integer), from the command line; expected true or false",
    )
    assert len(message.splitlines()) == 6
    assert not (workplace.folder / "runs").exists()


def test_values_out_of_range_are_reported_with_those_of_the_plugins(workplace: Workplace) -> None:
    refuse(
        workplace,
        2,
        ("rollout.temperature: found 0.0", "training.minibatches_per_step", "optimizer.eps: found 0.0"),
        "optimizer.eps=0.0",
        "rollout.temperature=0.0",
        "training.minibatches_per_step=5",
    )
    refuse(
        workplace,
        2,
        ("2 problem(s)", "trainer.fsdp2.collective_timeout_s: found 0", "environment.arithmetic.num_train: found 0"),
        "trainer.fsdp2.collective_timeout_s=0",
        "environment.arithmetic.num_train=0",
    )


@pytest.mark.parametrize("command", ["train", "check", "config"])
def test_homes_of_nobody_are_reported_at_once(workplace: Workplace, command: str) -> None:
    keys = [
        *("model.path", "reference.path", "critic.path", "run.directory", "data.train.path", "lora.init_from"),
        *("environment.judge.prompt_file", "environment.agent.function", "environment.function.path"),
        *("environment.reward_model.path", "trainer.megatron.pretrained_checkpoint"),
        *("generator.vllm.refit_directory", "generator.vllm.speculative_model", "generator.sglang.refit_directory"),
    ]
    judge = ("environment.judge.base_url=http://127.0.0.1:9/v1", "environment.judge.model=m", "data.train.source=jsonl")
    files = 'environment.nemo_gym.train_files=["~no-such-user/x"]'
    expect_failure(
        workplace.rlcore(command, "grpo.toml", *(f"{key}=~no-such-user/x" for key in keys), files, *judge),
        2,
        f"{len(keys) + 1} problem(s) in the recipe",
        *(f'{key}: found "~no-such-user/x"' for key in keys if key != "environment.function.path"),
        'environment.function.path: found "~no-such-user/x" (a string)',
        'environment.nemo_gym.train_files[0]: found "~no-such-user/x"',
        "where a leading ~ or ~name is a user's home",
    )
    assert not [*workplace.folder.glob("~*")]


# The data


def test_a_data_set_that_is_not_there(workplace: Workplace) -> None:
    write_jsonl(workplace.folder / "train.jsonl", ROWS)
    parts = ("data.train.path: found no file", "tarin.jsonl", "Did you mean", "train.jsonl?")
    refuse(workplace, 4, parts, "data.train.source=jsonl", "data.train.path=tarin.jsonl")
    (workplace.folder / "hub").mkdir()
    parts = ("data.train.path: the data set", "hub' (split 'none') does not load")
    refuse(workplace, 4, parts, "data.train.source=huggingface", "data.train.path=./hub", "data.train.split=none")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_data_set_that_is_empty_or_lacks_a_field(workplace: Workplace, suffix: str) -> None:
    def write(rows: list[dict[str, str]]) -> None:
        frame = pandas.DataFrame(rows, columns=list(rows[0]) if rows else ["prompt", "answer"], dtype="string")
        path = workplace.folder / f"data.{suffix}"
        frame.to_parquet(path) if suffix == "parquet" else frame.to_json(path, orient="records", lines=True)

    source = (f"data.train.source={suffix}", f"data.train.path=data.{suffix}")
    write([])
    refuse(workplace, 4, ("data.train: found no rows in", f"data.{suffix}", "at least one"), *source)
    write([{"question": row["prompt"], "answer": row["answer"]} for row in ROWS])
    parts = ("lacks the field 'prompt'", "found the fields 'question', 'answer'", 'data.train.prompt_field = "question"')
    refuse(workplace, 4, parts, *source)
    write([{"prompt": row["prompt"], "solution": row["answer"]} for row in ROWS])
    refuse(workplace, 4, ("'prompt', 'solution'", "answer"), *source)


def test_demonstrations_without_completions(workplace: Workplace) -> None:
    write_jsonl(workplace.folder / "data.jsonl", ROWS)
    parts = ("no field 'completion'", "'prompt', 'answer'", "data.train.completion_field")
    refuse(workplace, 4, parts, "data.train.source=jsonl", "data.train.path=data.jsonl", recipe="sft.toml")


@pytest.mark.parametrize("recipe", ["grpo.toml", "sft.toml"])
def test_prompts_over_the_limit_end_the_run_or_are_dropped(workplace: Workplace, recipe: str) -> None:
    rows = [{**row, "completion": row["answer"]} for row in ROWS]
    long = {"prompt": "1+1+1+1+1=", "answer": "5", "completion": "5"}
    write_jsonl(workplace.folder / "data.jsonl", [*rows[:5], long, *rows[5:], long])
    source = ["data.train.source=jsonl", "data.train.path=data.jsonl"]
    parts = ("row 5", "a prompt of 10 tokens", "at most 8 (rollout.max_prompt_tokens)", "1 more of the 14 rows")
    message = refuse(workplace, 4, parts, *source, recipe=recipe)
    assert 'data.train.on_long_prompt = "drop"' in message
    run = workplace.train(
        recipe, *source, "data.train.on_long_prompt=drop", "logging.rollouts_every_n_steps=1", "run.num_steps=4"
    )
    if recipe == "grpo.toml":
        read = [pandas.read_parquet(path) for path in sorted((run / "rollouts").glob("step-*"))]
        assert set(pandas.concat(read)["prompt"]) == {row["prompt"] for row in rows}
    limit = "rollout.max_prompt_tokens=3"
    expect_failure(
        workplace.rlcore("train", recipe, *source, "data.train.on_long_prompt=drop", limit, "run.name=none"), 4, "none is left"
    )


def test_held_out_prompts_over_the_limit(workplace: Workplace) -> None:
    write_jsonl(workplace.folder / "held.jsonl", [{"prompt": "1+1+1+1+1=", "answer": "5"}])
    parts = ("data.evaluation: row 0", "a prompt of 10 tokens")
    refuse(workplace, 4, parts, "data.evaluation.source=jsonl", "data.evaluation.path=held.jsonl")


# The model


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_a_model_directory_without_weights(workplace: Workplace, model: Path, command: str) -> None:
    shutil.copytree(model, workplace.folder / "bare")
    (workplace.folder / "bare" / "model.safetensors").unlink()
    result = workplace.rlcore(command, "grpo.toml", "model.path=bare")
    expect_failure(result, 5, "1 problem(s) with the model", "bare: found no weights; expected model.safetensors")


def test_a_model_directory_that_is_empty_or_not_there(workplace: Workplace) -> None:
    (workplace.folder / "bare").mkdir()
    refuse(workplace, 5, ("3 problem(s)", "no config.json", "no weights", "no tokenizer"), "model.path=bare")
    refuse(workplace, 5, ("/absent: found no such directory",), "model.path=./absent")


def test_an_unsupported_architecture(workplace: Workplace, model: Path) -> None:
    shutil.copytree(model, workplace.folder / "strange")
    config = json.loads((model / "config.json").read_text())
    (workplace.folder / "strange" / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    parts = ("config.json: found architecture OddForCausalLM; expected Qwen3ForCausalLM",)
    refuse(workplace, 5, parts, "model.path=strange")


@pytest.mark.parametrize("command", ["train", "check"])
def test_weights_that_are_cut_short(workplace: Workplace, model: Path, command: str) -> None:
    shutil.copytree(model, workplace.folder / "cut")
    weights = workplace.folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    parts = ("1 problem(s) with the model", "cut/model.safetensors: found 1,000 bytes; expected ")
    expect_failure(workplace.rlcore(command, "grpo.toml", "model.path=cut"), 5, *parts)


def test_weights_of_other_shapes_than_the_config_says(workplace: Workplace, model: Path, other_model: Path) -> None:
    shutil.copytree(model, workplace.folder / "mixed")
    shutil.copy(other_model / "model.safetensors", workplace.folder / "mixed")
    parts = ("mixed: found weights of 1 layers", "expected [16, 32]")
    expect_failure(workplace.rlcore("train", "grpo.toml", "model.path=mixed"), 5, *parts)


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 95},
        {"hidden_act": "nope"},
        {"rope_theta": 5e5},
        {"num_attention_heads": "four"},
        {"layer_types": ["full_attention"]},
    ],
)
def test_commands_without_a_trainer_refuse_the_same_models(
    workplace: Workplace, model: Path, changes: dict[str, object]
) -> None:
    shutil.copytree(model, workplace.folder / "odd")
    content = json.loads((model / "config.json").read_text())
    (workplace.folder / "odd" / "config.json").write_text(json.dumps(content | changes))
    checked, measured, served = (
        workplace.rlcore(*arguments)
        for arguments in (
            ("check", "grpo.toml", "model.path=odd"),
            ("eval", "grpo.toml", "model.path=odd"),
            ("serve", str(workplace.folder / "odd"), "--generator", "transformers"),
        )
    )
    for result in (checked, measured):
        expect_failure(result, 5, next(iter(changes)), "odd")
    assert checked.stderr == measured.stderr
    assert served.exit_code == 5
    problems = [line for line in checked.stderr.splitlines() if "odd" in line]
    assert [line for line in problems if line not in served.stderr] == []


def test_a_model_for_shorter_sequences_is_named_once(workplace: Workplace) -> None:
    parts = ("1 problem(s)", "max_position_embeddings = 64", "at least 78", "rollout.max_prompt_tokens")
    refuse(workplace, 5, parts, "rollout.max_response_tokens=70")


# The installation


def test_every_backend_disabled_by_the_environment(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "trainer:fsdp2, rlcore-transformers, rlcore-mlx")
    parts = (
        "no usable generator is installed for device cpu; install, enable or repair one",
        "Installed generators",
        "transformers (rlcore-transformers 0.1.0): disabled",
    )
    refuse(workplace, 3, parts)
    refuse(
        workplace,
        3,
        ("no usable trainer is installed for device cpu", "fsdp2 (rlcore-fsdp2 0.1.0): disabled"),
        recipe="sft.toml",
    )
    listing = json.loads(workplace.rlcore("plugins", "--json").stdout)
    disabled = {plugin["name"] for plugin in listing["plugins"] if plugin["state"] == "disabled"}
    assert disabled == {"fsdp2", "transformers", "mlx"}
    assert listing["auto"]["trainer"]["name"] is None


def test_every_backend_disabled_by_the_recipe(workplace: Workplace) -> None:
    refuse(
        workplace, 3, ("no usable trainer", "fsdp2 (rlcore-fsdp2 0.1.0): disabled"), 'plugins.disable=["fsdp2", "trainer:mlx"]'
    )
    refuse(workplace, 3, ("algorithm 'grpo' is disabled", "sft (rlcore-sft"), 'plugins.disable=["rlcore-grpo"]')
    refuse(workplace, 3, ("generator 'tgi' is not installed", "transformers (rlcore-transformers"), "generator.name=tgi")


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_name_to_disable_that_names_nothing_is_noted(workplace: Workplace, command: str) -> None:
    result = workplace.rlcore(command, "grpo.toml", 'plugins.disable=["fsdp3"]', "run.num_steps=1")
    assert result.exit_code == 0
    assert "warning: 'fsdp3' is to be disabled, but no such plugin is installed; did you mean 'fsdp2'?" in result.output
