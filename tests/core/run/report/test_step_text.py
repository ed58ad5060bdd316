"""Figures in words."""

from rlcore.run.report.plain_progress import describe_metrics, describe_times


def test_figures_in_words() -> None:
    assert describe_metrics({"loss": 0.5}) == [("loss", "0.5000")]
    assert describe_metrics({"loss": 0.5, "reward_mean": 1.0}) == [("reward", "1.000")]
    assert describe_metrics({"speculative/mean_acceptance_length": 2.345}) == [("acceptance length", "2.35")]
    assert describe_times({"reward_mean": 1.0}) == []
    assert describe_times({"time/total_s": 0.5}) == ["0.50 s"]
