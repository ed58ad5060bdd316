"""The name that was meant."""

from collections.abc import Sequence

import pytest

from rlcore.schema.suggestions import did_you_mean, nearest

ALGORITHMS = ("cispo", "dapo", "dpo", "dr_grpo", "gdpo", "gmpo", "grpo", "gspo", "ppo", "rloo", "sapo", "sft", "vespo")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("lerning_rate", ["rank", "learning_rate"], "learning_rate"),
        ("zzz", ["learning_rate"], None),
        ("a", [], None),
        ("gpro", ALGORITHMS, "grpo"),
        ("grop", ALGORITHMS, "grpo"),
        ("GRPO", ALGORITHMS, "grpo"),
        ("gsop", ALGORITHMS, "gspo"),
        ("gopd", ALGORITHMS, "gdpo"),
        ("stf", ALGORITHMS, "sft"),
        ("dr-grpo", ALGORITHMS, "dr_grpo"),
        ("rlo", ALGORITHMS, "rloo"),
        ("qwen3", ["Qwen3"], "Qwen3"),
    ],
)
def test_the_nearest_of_the_known_names(name: str, known: Sequence[str], expected: str | None) -> None:
    assert nearest(name, known) == expected


def test_a_half_sentence_for_messages() -> None:
    assert did_you_mean("fsdp", {"fsdp2", "megatron"}) == "; did you mean 'fsdp2'?"
    assert did_you_mean("zzz", {"fsdp2"}) == ""
