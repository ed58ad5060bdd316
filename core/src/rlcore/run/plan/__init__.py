"""What a recipe asks for, decided before anything is allocated: plugins, placement, the refit channel, inputs."""
