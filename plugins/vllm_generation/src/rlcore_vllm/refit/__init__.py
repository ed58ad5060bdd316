"""The sending side of a refit: to the run's own engines, and to vLLM servers that follow it."""
