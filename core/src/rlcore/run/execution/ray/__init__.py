"""Workers on Ray, one process a rank, and the objects through which a run uses them; only runs with `[cluster]` import it."""
