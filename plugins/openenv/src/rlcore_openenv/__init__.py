"""The environment `openenv`: episodes on OpenEnv servers."""
