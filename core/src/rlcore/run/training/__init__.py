"""The loop of a run from its plan to its end, however often its workers are started anew."""
