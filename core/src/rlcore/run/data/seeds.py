"""Streams of randomness: each purpose and step has its own, so that a resumed run draws what the first would have drawn."""

from enum import IntEnum


class Stream(IntEnum):
    """The purpose of a random draw; the second element of a numpy SeedSequence key."""

    DATA = 0
    ROLLOUTS = 1
    EVALUATION = 2
    MINIBATCHES = 3
    CURRICULUM = 4
