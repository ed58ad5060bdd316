"""Plans a run before anything is allocated: plugins, placement, the refit channel, inputs."""
