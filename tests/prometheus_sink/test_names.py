"""Names of metrics in Prometheus: units, labels, counters."""

import re

import pytest

from rlcore_prometheus.names import COUNTED, exported

CASES = {
    "reward_mean": ("rlcore_reward_mean", {}, 1.0),
    "reward/answer": ("rlcore_reward_component", {"component": "answer"}, 1.0),
    "time/total_s": ("rlcore_step_seconds", {}, 1.0),
    "time/generation_s": ("rlcore_step_phase_seconds", {"phase": "generation"}, 1.0),
    "time/trainer_idle_s": ("rlcore_step_idle_seconds", {"role": "trainer"}, 1.0),
    "memory/trainer_idle_gib": ("rlcore_memory_trainer_idle_bytes", {}, 2.0**30),
    "truncated_fraction": ("rlcore_truncated_ratio", {}, 1.0),
    "eval/pass@1": ("rlcore_eval_pass_at_1", {}, 1.0),
    "eval/pass@8_low": ("rlcore_eval_pass_at_8_low", {}, 1.0),
    "eval/pass@1/hard sums": ("rlcore_eval_pass_at_1", {"dataset": "hard sums"}, 1.0),
    "data/sums/reward_mean": ("rlcore_data_set_reward_mean", {"dataset": "sums"}, 1.0),
    "data/level": ("rlcore_data_level", {}, 1.0),
    "checkpoint_eval/näme-1": ("rlcore_checkpoint_eval_n_me_1", {}, 1.0),
    "refit/sent_mib": ("rlcore_refit_sent_bytes", {}, 2.0**20),
    "updates": ("rlcore_updates", {}, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_metric_has_a_name_labels_and_a_unit(name: str) -> None:
    found = exported(name)
    assert (found.name, dict(found.labels), found.scale) == CASES[name]
    assert found.is_counter == (name in COUNTED)
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", found.name)
