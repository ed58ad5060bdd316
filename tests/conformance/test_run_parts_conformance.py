"""Collector, observers of the loop, tokenizers and renderer of this repository pass the conformance kit."""

import pytest

from rlcore_conformance import (
    CollectorConformance,
    LoopObserverConformance,
    RendererConformance,
    TokenizerConformance,
)
from rlcore_report.provider import LOGPROB_MISMATCH
from rlcore_rollout.provider import EPISODES
from rlcore_text.provider import JINJA_TEMPLATES, TRANSFORMERS


class TestEpisodes(CollectorConformance):
    @pytest.fixture
    def provider(self):
        return EPISODES


class TestLogprobMismatch(LoopObserverConformance):
    @pytest.fixture
    def provider(self):
        return LOGPROB_MISMATCH


class TestTransformers(TokenizerConformance):
    @pytest.fixture
    def provider(self):
        return TRANSFORMERS


class TestJinjaTemplates(RendererConformance):
    @pytest.fixture
    def provider(self):
        return JINJA_TEMPLATES
