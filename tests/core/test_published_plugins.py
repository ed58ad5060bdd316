"""Hints about plugins that are not installed name the command from the list of released plugins."""

from collections.abc import Sequence

import pytest

from rlcore.published_plugins import first_published, how_to_install, pip_line


@pytest.mark.parametrize(
    ("role", "name", "installed", "told"),
    [
        ("algorithm", "sft", (), "Run: pip install rlcore-sft"),
        ("algorithm", "dapo", ("sft",), "Run: pip install rlcore-grpo"),
        ("algorithm", "gpro", ("grpo", "gspo"), 'Did you mean "grpo"?'),
        ("algorithm", "gpro", (), 'Did you mean "grpo"? Run: pip install rlcore-grpo'),
        ("generator", "VLLM", (), "Did you mean \"vllm\"? Run: pip install 'rlcore-vllm[cuda]'"),
        ("trainer", "swfit", ("swift",), 'Did you mean "swift"?'),
        ("environment", "zzz", ("function",), ""),
        ("sink", "wandb", (), "Run: pip install rlcore-wandb"),
        ("environment", "judge", (), "Run: pip install 'rlcore[rewards]'"),
        ("importer", "nemo_rl", (), 'Did you mean "nemo-rl"? Run: pip install rlcore-import'),
        ("observer", "watch", (), ""),
    ],
)
def test_what_to_do_where_a_name_is_not_installed(role: str, name: str, installed: Sequence[str], told: str) -> None:
    assert how_to_install(role, name, installed) == told


def test_a_run_begins_with_the_first_of_each_role() -> None:
    first = [first_published(role) for role in ("trainer", "generator", "algorithm")]
    assert first == ["rlcore-fsdp2", "rlcore-transformers", "rlcore-grpo"]
    assert first_published("codec") is None
    assert pip_line(["b[x]", "a", "a"]) == "pip install 'b[x]' a"
