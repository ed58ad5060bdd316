"""An environment of Harbor without a container: commands run in a folder of the machine, which stands for the root."""

import asyncio
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult

FOLDERS = ("/app", "/logs", "/tests")
"""Folders of a task. Where a command names one, that below the environment's own folder is meant. Scripts find it in ROOT."""


class LocalEnvironment(BaseEnvironment):
    """Runs commands as the run's user, without any isolation: for tests and tasks of one's own alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._root = Path(tempfile.mkdtemp(prefix="harbor-local-"))

    @staticmethod
    def type() -> str:
        return "local"

    def _validate_definition(self) -> None:
        """Any task will do: there is nothing to build."""

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 - the form
        for folder in (*FOLDERS, "/logs/agent", "/logs/verifier", "/logs/artifacts"):
            self._local(folder).mkdir(parents=True, exist_ok=True)
        setup = self.environment_dir / "setup.sh"
        if setup.exists() and (await self.exec(setup.read_text())).return_code:
            raise RuntimeError("environment/setup.sh failed")

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 - the form
        shutil.rmtree(self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._local(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._local(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._local(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._local(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._local(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,  # noqa: ARG002 - the form
    ) -> ExecResult:
        for folder in FOLDERS:
            command = command.replace(folder, f"{self._root}{folder}")
        program = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=self._local(cwd or "/app"),
            env={**os.environ, "ROOT": str(self._root), "TMUX_TMPDIR": str(self._root), **self._persistent_env, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.wait_for(program.communicate(), timeout_sec)
        finally:
            if program.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=program.returncode or 0)

    def _local(self, path: str) -> Path:
        return self._root / path.lstrip("/")
