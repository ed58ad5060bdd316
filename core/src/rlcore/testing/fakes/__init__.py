"""Fakes of every role: small, correct implementations in numpy with which a whole run takes a moment.

Their one model is a table of logits (`policy`), so they need no model directory; trainer and generator compute the same
distribution, and what they declare passes the conformance kit.
"""

from rlcore.testing.fakes.providers import (
    FAKE_ALGORITHM,
    FAKE_ENVIRONMENT,
    FAKE_EXECUTION,
    FAKE_GENERATOR,
    FAKE_TRAINER,
    fake_registry,
)
from rlcore.testing.fakes.tokenizer import FakeTokenizer

__all__ = [
    "FAKE_ALGORITHM",
    "FAKE_ENVIRONMENT",
    "FAKE_EXECUTION",
    "FAKE_GENERATOR",
    "FAKE_TRAINER",
    "FakeTokenizer",
    "fake_registry",
]
