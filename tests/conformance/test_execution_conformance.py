"""The core's own execution passes the conformance kit."""

import pytest
from attrs import evolve

from rlcore.run.execution.provider import IN_PROCESS
from rlcore_conformance import ExecutionConformance


class TestInProcess(ExecutionConformance):
    @pytest.fixture
    def provider(self):
        return evolve(IN_PROCESS, name="again")
