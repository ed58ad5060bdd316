"""Parts of rlcore that a package of somebody else's brings."""
