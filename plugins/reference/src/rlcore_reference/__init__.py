"""The reference's log-probabilities: kept of the rows of a data set, and asked for while samples come in."""
