"""Tests mirror the sources: `run/plan/channel.py` of the core is tested by tests/core/run/plan/test_channel.py.

Modules without a test file of their own are named here with the tests that go through them.
"""

import ast
from pathlib import Path

import pytest

DECLARATIONS = {"__init__", "__main__", "config", "provider"}
"""Names of modules that declare and compute nothing; tests/core/config and `rlcore plugins` read all of them."""

FOLDERS = {
    "core/testing/conformance": "core/testing/conformance/test_mutants.py",
    "torchkit/architectures": "torchkit/architectures/test_registry.py",
    "megatron_backend/families": "megatron_backend/test_families.py",
}
"""Folders whose modules are tested as one."""

THROUGH = {
    "core/registry/test_commands.py": "core/cli/commands",
    "core/registry/test_generator_handle.py": "core/registry/sample_checks",
    "core/run/plan/test_auto_options.py": "core/registry/functions",
    "core/rewards/test_environment.py": "core/rewards/prompts core/rewards/python core/rewards/worker",
    "core/rewards/test_judge.py": "core/rewards/judge_template",
    "core/run/data/test_prompts.py": "core/run/data/rendering",
    "system/test_hub.py": "core/run/plan/hub_check",
    "core/run/plan/test_inputs.py": "core/run/plan/data_sets",
    "core/agents/test_environment.py": "core/agents/function core/agents/process",
    "core/run/execution/ray/test_pool_failures.py": "core/run/execution/ray/calls core/run/execution/ray/pending_call "
    "core/run/execution/ray/pool",
    "core/run/rollout/test_agent_collector.py": "core/run/rollout/agent_groups",
    "core/run/rollout/test_conversations.py": "core/chat/conversation",
    "core/run/rollout/test_episode_run.py": "core/run/rollout/turns core/run/rollout/loop_work core/run/rollout/group_work "
    "core/run/rollout/group_starts core/run/rollout/prompt_groups core/run/rollout/step_collector",
    "core/sessions/test_server.py": "core/sessions/errors core/sessions/replies",
    "core/serve/test_serving.py": "core/serve/generator_server",
    "core/testing/fakes/test_trainer.py": "core/testing/fakes/ranked_trainer core/testing/fakes/residency",
    "fsdp2_backend/test_plan.py": "core/testing/plans",
    "grpo/test_loss.py": "grpo/importance",
    "megatron_backend/test_layout.py": "megatron_backend/corrected_router",
    "megatron_backend/test_families.py": "megatron_backend/models",
    "megatron_backend/test_weight_mapping.py": "megatron_backend/weight_source megatron_backend/weight_table "
    "megatron_backend/latent_weights",
    "nemo_gym_environment/test_environment.py": "nemo_gym_environment/agent_servers",
    "nemo_gym_environment/test_policy_server.py": "nemo_gym_environment/server_thread",
    "openai_generation/test_backend.py": "openai_generation/endpoint openai_generation/endpoints openai_generation/errors "
    "openai_generation/probe",
    "openenv/test_environment.py": "openenv/episode openenv/policy",
    "planner/test_plan.py": "planner/layouts planner/work planner/step_work",
    "recipe_import/test_listed_keys.py": "recipe_import/verl_rows",
    "transformers_generation/test_engine_streams.py": "transformers_generation/jobs transformers_generation/places",
    "sglang_generation/test_backend.py": "sglang_generation/host",
    "verifiers_environment/test_environment.py": "verifiers_environment/client",
    "vllm_generation/test_backend.py": "vllm_generation/engine",
    "vllm_generation/test_speculation.py": "vllm_generation/draft_counter",
    "vllm_generation/test_transfer.py": "vllm_generation/weight_transfer",
}
"""Modules that have no test file of their own, by the one whose tests go through them."""


@pytest.fixture(scope="module")
def modules(root: Path, core_files: list[Path], torchkit_files: list[Path], plugin_files: list[Path]) -> set[str]:
    """Every module that does something, as the path of its tests without `test_`: "core/run/plan/channel"."""
    names = set()
    for path in (*core_files, *torchkit_files, *plugin_files):
        folder, _, inside = path.relative_to(root).as_posix().partition("/src/")
        module = Path(folder.removeprefix("plugins/"), *Path(inside).parts[1:]).with_suffix("")
        if module.name not in DECLARATIONS and module.parent.as_posix() not in FOLDERS and computes(path):
            names.add(module.as_posix())
    assert len(names) > 100
    return names


def computes(path: Path) -> bool:
    """Return whether a function of a module has a body. A module without one declares records, names and hooks."""
    functions = (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return any(not isinstance(statement, ast.Expr) for function in functions for statement in function.body)


@pytest.fixture(scope="module")
def tested(root: Path, modules: set[str]) -> set[str]:
    """Modules that have a test file of their own."""
    return {name for name in modules if (root / "tests" / Path(name).parent / f"test_{Path(name).name}.py").is_file()}


def test_every_module_has_tests_of_its_name(modules: set[str], tested: set[str]) -> None:
    missing = modules - tested - set(" ".join(THROUGH.values()).split())
    assert not missing, "write tests/.../test_<module>.py, or name in THROUGH what tests: " + ", ".join(sorted(missing))


def test_the_list_of_others_holds_no_module_that_is_gone_or_has_its_own(modules: set[str], tested: set[str]) -> None:
    listed = " ".join(THROUGH.values()).split()
    assert len(listed) == len(set(listed))
    wrong = set(listed) - (modules - tested)
    assert not wrong, "take out of THROUGH: " + ", ".join(sorted(wrong))


def test_what_tests_them_is_there(root: Path) -> None:
    assert not [path for path in (*THROUGH, *FOLDERS.values()) if not (root / "tests" / path).is_file()]
