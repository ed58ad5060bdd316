"""A child's output goes to its log file, and messages show the end of that."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from rlcore_workers.logged_process import LoggedProcess, last_lines, new_log_file


def test_the_first_line_of_a_death_stands_by_itself(tmp_path: Path) -> None:
    """It is what notes show."""
    log = tmp_path / "rank-0.log"
    assert last_lines(log) == f"Its output is in {log}, on its own node"
    log.write_text("")
    assert last_lines(log) == f"Its output is in {log}, where it wrote nothing"
    log.write_text("one\ntwo\n")
    assert last_lines(log) == f"Its output is in {log}.\nIts last lines:\n  one\n  two"


def test_a_process_shows_what_it_wrote_itself_and_ends_with_its_group(tmp_path: Path) -> None:
    log = new_log_file(tmp_path / "logs", "engine")
    log.write_text("of a process before\n")
    script = "import sys; print('begun', flush=True); print('told', file=sys.stderr, flush=True); sys.stdin.read()"
    process = LoggedProcess([sys.executable, "-c", script], log, env=os.environ, stdin=subprocess.PIPE)
    while process.output() != "begun\ntold\n":
        assert process.poll() is None
    assert os.getpgid(process.pid) == process.pid
    process.kill_group()
    assert process.wait(60) == -signal.SIGKILL
    assert process.last_lines() == f"Its output is in {log}.\nIts last lines:\n  begun\n  told"
    process.kill_group()
    assert process.stdin is not None
    process.stdin.close()


def test_without_a_directory_the_log_file_is_a_temporary_one() -> None:
    log = new_log_file(None, "engine")
    try:
        assert (log.exists(), log.suffix) == (True, ".log")
    finally:
        log.unlink()
