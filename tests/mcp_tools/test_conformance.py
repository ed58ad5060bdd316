"""The kit's checks on a real server."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcore.spi import Provider, Row
from rlcore_conformance import EnvironmentConformance
from rlcore_mcp.config import McpConfig, McpServerConfig
from rlcore_mcp.provider import MCP


class TestMcp(EnvironmentConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        return MCP

    @pytest.fixture
    def config(self) -> McpConfig:
        command = (sys.executable, str(Path(__file__).with_name("tool_server.py")))
        server = McpServerConfig(command=command, tools=("add", "fail", "picture", "variable"))
        return McpConfig(servers={"sums": server})

    @pytest.fixture
    def row(self) -> Row:
        return {"prompt": "2 + 3 = ?", "answer": "5"}

    @pytest.fixture
    def answers(self) -> Sequence[str]:
        return ["5", "6"]
