"""An environment for rlcore: the policy calls the tools of MCP servers."""
