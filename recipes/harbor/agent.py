"""An agent of Harbor that asks the policy once and writes its answer into a file of the task's environment."""

import asyncio
import json
import os
import shlex
import urllib.request

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class OneAnswer(BaseAgent):
    """Writes the policy's answer to the instruction into /app/answer.txt."""

    @staticmethod
    def name() -> str:
        return "one-answer"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing: the agent runs beside the environment."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:  # noqa: ARG002 - the form
        answer = await asyncio.to_thread(ask, instruction.strip())
        await environment.exec(f"printf %s {shlex.quote(answer)} > /app/answer.txt")


def ask(text: str) -> str:
    """Return the policy's answer to a user's message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""
