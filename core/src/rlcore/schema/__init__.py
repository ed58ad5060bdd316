"""What types and values of configuration are, in words: shared by recipes, plugins and their sections. Builds on the interface alone."""
