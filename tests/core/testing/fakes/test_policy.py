"""The policy of the fakes."""

import numpy as np

from rlcore.testing.fakes.policy import log_softmax, make_weights


def test_weights_follow_the_seed_and_softmax_is_one():
    assert all((make_weights(5, 1, 1.0)[name] == value).all() for name, value in make_weights(5, 1, 1.0).items())
    assert any((make_weights(5, 2, 1.0)[name] != value).any() for name, value in make_weights(5, 1, 1.0).items())
    table = log_softmax(np.array([[1e3, 0.0, -1e3], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(np.exp(table).sum(axis=1), 1.0)
