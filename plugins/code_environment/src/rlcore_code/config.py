"""The recipe section `[environment.code]`."""

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Positive, at_least, at_least_below

PROBLEM = "{problem}"
"""The placeholder of the instruction."""


@frozen(kw_only=True)
class CodeConfig:
    """`[environment.code]`: Python programs against the tests of a row; rows come from `[data]`."""

    tests_field: str = "tests"
    """Field with the tests, a list of any of: {"input": text, "output": text} for a program's standard input and output;
    {"call": name, "arguments": [...], "result": value} for a function; and texts "assert f(2) == 4"."""
    setup_field: str = "setup"
    """Field with Python code, a text or a list of texts, that runs before the program where functions are tested; a row may
    lack it."""
    instruction: str = "{problem}\n\nWrite a Python program, and put all of it into one code block at the end."
    """The question; {problem} stands for the row's prompt. A prompt that is a list of messages is used as it is."""
    prompt_format: Literal["text", "chat"] = "chat"
    """The form of the prompt. "chat": the instruction is a user's message for the chat template. "text": the instruction is the
    prompt itself."""
    system_prompt: str | None = None
    """A system message before it; only for "chat"."""
    thought_in_prompt: bool = False
    """True where the prompt begins a thought and ends in other text than `<think>`, such as `<think>\\nOkay`. A program then
    counts only after the thought's end. rlcore sees a prompt that ends in the mark itself."""
    partial_credit: Annotated[float, at_least_below(0, 1, "A program that passes all tests earns 1.")] = 0.0
    """Reward of a program that fails some tests: this, times the share that it passes. With 0.0 the tests end at the first
    one that fails."""
    isolation: Literal["namespaces", "limits"] = "namespaces"
    """The sandbox of a program. "namespaces": its own file system, processes and network, by Linux namespaces; the run is
    refused if the kernel refuses these. "limits": a filter of system calls, limits of resources and, if the kernel has it,
    Landlock. Without Landlock a program can read what its user can read: use it only inside a container that holds nothing
    else."""
    cpu_time_s: Positive = 5
    """Most CPU seconds of each process of a program, for one test of input and output or for all tests of functions."""
    wall_time_s: Annotated[float, at_least(1)] = 30.0
    """Most seconds for all tests of a response together, also on a busy machine. Tests that have not passed by then have
    failed."""
    max_memory_mib: Annotated[int, at_least(64)] = 512
    """Most address space of each process of a program, in MiB."""
    max_processes: Positive = 4
    """Most processes and threads of a program at once. With `isolation = "limits"` all of its user's processes count, so that
    it can start none."""
    max_disk_mib: Positive = 8
    """Largest file of a program in MiB, and with "namespaces" all of its files together. Files are in memory."""
    max_output_kib: Positive = 1024
    """Most output of a program; one that writes more is ended, and has failed."""
    num_processes: Positive | None = None
    """Responses that are tested at once. None is one for each core that the run may use, at most 32."""
    python: Path | None = None
    """Interpreter of the programs, 3.11 or newer, with its installed packages. None is the run's interpreter with only the
    standard library."""
    readable: tuple[Path, ...] = ()
    """More folders that programs can read, besides what their interpreter and its packages need."""


def num_processes(config: CodeConfig) -> int:
    """How many responses are tested at once."""
    if config.num_processes is not None:
        return config.num_processes
    from rlcore_workers.pool import default_processes  # which listing the plugins does not need

    return default_processes()
