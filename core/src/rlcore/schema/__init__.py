"""What types and values of a configuration are, in words, for recipes and plugins alike; builds on the interface alone."""
