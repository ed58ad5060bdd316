"""A stream of generators that only answer whole requests."""

import numpy as np


def answer_stream(generate, feed):
    """Answer what a feed brings, one request after another, until it ends."""
    first = 0
    while (taken := feed.take(wait=True)) is not None:
        for request in taken:
            feed.deliver(first + np.arange(len(request.seeds)), generate(request))
            first += len(request.seeds)
