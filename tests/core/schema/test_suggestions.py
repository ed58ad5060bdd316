"""The name that was meant."""

from rlcore.schema.suggestions import did_you_mean, nearest


def test_the_nearest_of_the_known_names() -> None:
    assert nearest("lerning_rate", ["rank", "learning_rate"]) == "learning_rate"
    assert nearest("zzz", ["learning_rate"]) is None
    assert nearest("a", []) is None


def test_a_half_sentence_for_messages() -> None:
    assert did_you_mean("fsdp", {"fsdp2", "megatron"}) == "; did you mean 'fsdp2'?"
    assert did_you_mean("zzz", {"fsdp2"}) == ""
