"""From installed packages to typed handles: discovery, selection, binding, and the checks at each backend's boundary."""
