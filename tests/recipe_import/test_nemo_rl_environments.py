"""Environments of NeMo-RL become rlcore's; a missing one is reported first."""

from pathlib import Path

import pytest

from .nemo_recipes import grpo, reported


@pytest.mark.parametrize(
    ("name", "env", "expected"),
    [
        ("math", "{math: {num_workers: 8, math_verify_impl: hf_math_verify}}", "math"),
        ("math_default", "{math_default: {}}", "math"),
        ("math", "{math: {verifier_type: english_multichoice}}", "unrewarded"),
        ("reward_model", "{reward_model: {model_name: acme/judge}}", "reward_model"),
        ("nemo_gym", "{nemo_gym: {config_paths: [a.yaml], effort_levels: {low_weight: 0.1}}}", "nemo_gym"),
        ("math_multi_reward", "{math_multi_reward: {num_workers: 8}}", "unrewarded"),
        ("code", "{code: {num_workers: 8}}", "unrewarded"),
        ("code_jaccard", "{code_jaccard: {num_workers: 8}}", "unrewarded"),
        ("vlm", "{vlm: {num_workers: 8, reward_functions: [{name: format, weight: 1}]}}", "unrewarded"),
        ("sliding_puzzle_game", "{sliding_puzzle_game: {cfg: {max_moves: 3}}}", "unrewarded"),
    ],
)
def test_each_environment_is_one_of_ours_or_reported_first(tmp_path: Path, valid, name: str, env: str, expected: str) -> None:
    found = grpo(tmp_path, f"data.default={{env_name: {name}}}", f"env={env}")
    assert valid(found).environment.name == expected
    if expected == "unrewarded":
        known = [one for one in found.unmapped if "not known" not in one.why]
        assert known[0].key in ("env", "env.math.verifier_type")
        assert "nothing is rewarded" in known[0].why
    assert ("environment.math.answer_field" in found.values) is (expected == "math")


def test_a_reward_model_is_mapped_with_its_numbers(tmp_path: Path) -> None:
    env = "{reward_model: {model_name: acme/judge, tokenizer: {name: acme/other}, precision: float32, batch_size: 4}}"
    found = grpo(tmp_path, "data.default={env_name: reward_model}", f"env={env}")
    section = "environment.reward_model"
    assert {key.removeprefix(f"{section}."): value for key, value in found.values.items() if key.startswith(section)} == {
        "path": "acme/judge",
        "prompt_format": "chat",
        "dtype": "float32",
        "max_batch": 4,
        "device": "cuda",
    }
    assert "env.reward_model.tokenizer.name" in reported(found)


def test_nemo_gym_reads_its_own_files(tmp_path: Path) -> None:
    data = "{default: {env_name: nemo_gym, dataset_name: NemoGymDataset, processor: nemo_gym_data_processor}, "
    data += "train: {data_path: rows.jsonl}, validation: {data_path: held.jsonl}}"
    found = grpo(tmp_path, f"data={data}", "env={nemo_gym: {config_paths: [a.yaml], effort_levels: {low_ub: 3}}}")
    assert found.values["environment.nemo_gym.train_files"] == ["rows.jsonl"]
    assert found.values["environment.nemo_gym.evaluation_files"] == ["held.jsonl"]
    assert {key: value for key, value in found.values.items() if key.startswith("data.")} == {
        "data.train.source": "environment",
        "data.evaluation.source": "environment",
    }
    assert {"env.nemo_gym", "env.nemo_gym.effort_levels", "grpo.overlong_filtering"} <= reported(found)
    assert "rollout.on_truncation" not in found.values


def test_tables_of_other_environments_are_not_read(tmp_path: Path) -> None:
    found = grpo(tmp_path, "env={math: {num_workers: 1}, clevr-cogent: {num_workers: 3, reward_functions: [x], brand_new: 1}}")
    assert {key for key in reported(found) if key.startswith("env")} == {"env.clevr-cogent.brand_new"}


def test_another_verifier_is_reported(tmp_path: Path) -> None:
    assert "env.math.math_verify_impl" in reported(grpo(tmp_path, "env={math: {math_verify_impl: dapo_math_verify}}"))


def test_prompts_are_read_from_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "cot.txt").write_text("Solve {} in \\boxed{{}}.")
    found = grpo(tmp_path, "data.default={prompt_file: prompts/cot.txt, env_name: math}")
    assert found.values["environment.math.instruction"] == "Solve {problem} in \\boxed{}."
    missing = grpo(tmp_path, "data.default={prompt_file: prompts/none.txt, env_name: math}")
    assert "data.default.prompt_file" in reported(missing)


def test_groups_are_not_replaced_without_rewards(tmp_path: Path) -> None:
    found = grpo(tmp_path, "data.default={env_name: vlm}", "env={vlm: {}}", "grpo.use_dynamic_sampling=true")
    assert "rollout.dynamic_sampling" not in found.values
    assert "grpo.use_dynamic_sampling" in reported(found)
