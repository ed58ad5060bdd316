"""The sink's part of the conformance kit."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import pytest

from rlcore.registry.binding import build_sink
from rlcore.spi import Provider
from rlcore.spi.sink import Sink, SinkContext
from rlcore_conformance.references.fixtures import ProviderFixtures, entry_of

OpenSink: TypeAlias = Callable[[], Sink]


class SinkConformance(ProviderFixtures):
    """The checks that every sink has to pass::

        class TestMine(SinkConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    Fixtures to override where the default does not fit: `config` (the provider's defaults), `figures` (of three steps) and
    `summary`.
    """

    @pytest.fixture
    def figures(self) -> Mapping[int, Mapping[str, float]]:
        """The figures of each step: not every one has all, and they are read-only."""
        first = {"step": 0.0, "eval/pass_at_1": 0.25}
        others = {step: {"step": float(step), "reward_mean": 0.5 / step, "loss": -0.1 * step} for step in (1, 2)}
        return {step: MappingProxyType(each) for step, each in {0: first, **others}.items()}

    @pytest.fixture
    def summary(self) -> Mapping[str, object]:
        """The content of summary.json at the end."""
        return MappingProxyType({"steps": 2, "seconds": 1.5})

    @pytest.fixture
    def open_sink(self, provider: Provider, config: Any, tmp_path: Path) -> OpenSink:
        """Builds a sink, each time in the same run directory."""
        context = SinkContext(run_directory=tmp_path, run_name="kit", recipe='[run]\nname = "kit"\n')
        return lambda: build_sink(entry_of("sink", provider, "cpu"), context, config)

    def test_a_whole_run(
        self, open_sink: OpenSink, figures: Mapping[int, Mapping[str, float]], summary: Mapping[str, object]
    ) -> None:
        """It takes the figures of each step, whichever these are, and changes none."""
        logged(open_sink(), figures).close(summary)

    def test_a_run_that_ended_early(self, open_sink: OpenSink, figures: Mapping[int, Mapping[str, float]]) -> None:
        """It can be closed without a summary, also before the first step."""
        open_sink().close(None)
        logged(open_sink(), figures).close(None)

    def test_a_resumed_run(
        self, open_sink: OpenSink, figures: Mapping[int, Mapping[str, float]], summary: Mapping[str, object]
    ) -> None:
        """It is built anew in the same directory, and takes steps again that it had before."""
        logged(open_sink(), figures).close(None)
        later = {step: each for step, each in figures.items() if step > 0}
        logged(open_sink(), later).close(summary)

    def test_figures_of_evaluations(
        self, open_sink: OpenSink, figures: Mapping[int, Mapping[str, float]], summary: Mapping[str, object]
    ) -> None:
        """One that takes figures of evaluated checkpoints takes those of earlier steps, and changes none."""
        sink = logged(open_sink(), figures)
        if hasattr(sink, "log_evaluation"):
            for step in figures:
                sink.log_evaluation(step, MappingProxyType({"checkpoint_eval/accuracy": 0.5}))
        sink.close(summary)

    def test_figures_that_are_not_finite(self, open_sink: OpenSink, figures: Mapping[int, Mapping[str, float]]) -> None:
        """A figure may be NaN or infinite."""
        step, usual = list(figures.items())[-1]
        sink = open_sink()
        for value in (float("nan"), float("inf")):
            sink.log(step, dict.fromkeys(usual, value))
        sink.close(None)


def logged(sink: Sink, figures: Mapping[int, Mapping[str, float]]) -> Sink:
    """The sink, once it has taken the figures."""
    for step, each in figures.items():
        sink.log(step, each)
    return sink
