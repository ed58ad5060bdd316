"""The command: tries families in children, keeps the outcomes in a file, prints and writes the table."""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

from attrs import asdict, evolve

from rlcore_fsdp2.families.outcome import Outcome

_PRELOADED = ["torch", "transformers", "rlcore_fsdp2.families.trial", "rlcore_fsdp2.backend", "rlcore_transformers.backend"]
_CLOSING_S = 10.0
"""Seconds for a child to end once it has answered."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status, which is 0 where no family is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m rlcore_fsdp2.families", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model_types to try; all by default")
    parser.add_argument("--results", type=Path, help="a file of outcomes, one a line: those that it has are not tried again")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose table is replaced, such as docs/models.md")
    parser.add_argument("--jobs", type=int, default=2, help="children at the same time")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for a family")
    options = parser.parse_args(arguments)
    outcomes = list(_tried(options.only or sorted(class_names()), options))
    for outcome in outcomes:
        print(json.dumps(asdict(outcome)))
    return 0 if all(outcome.is_sound for outcome in outcomes) else 1


def class_names() -> dict[str, str]:
    """The class of each model_type that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _tried(names: Sequence[str], options: argparse.Namespace) -> Iterator[Outcome]:
    known = {}
    if options.results is not None and options.results.exists():
        lines = options.results.read_text(encoding="utf-8").splitlines()
        known = {outcome.model_type: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}
    missing = [name for name in names if name not in known]
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for outcome in pool.map(lambda name: _in_child(name, options.time_limit), missing):
            known[outcome.model_type] = outcome
            print(outcome.model_type, outcome.trainer, outcome.trainer_reason[:150], outcome.generator, outcome.generator_reason[:150], f"{outcome.seconds:.1f}", file=sys.stderr)
            if options.results is not None:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    yield from (known[name] for name in names)


def _in_child(name: str, time_limit: float) -> Outcome:
    """Try a family in a process of its own, which a limit of time ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    begun, class_name = monotonic(), class_names()[name]
    child = context.Process(target=_try, args=(name, class_name, sender))
    child.start()
    sender.close()
    lost = Outcome(model_type=name, class_name=class_name, trainer="crashed")
    try:
        outcome = receiver.recv() if receiver.poll(time_limit) else evolve(lost, trainer_reason=f"over {time_limit:.0f} s")
    except EOFError:
        child.join()
        outcome = evolve(lost, trainer_reason=f"its process ended with {child.exitcode}")
    child.join(_CLOSING_S)
    child.kill()
    child.join()
    return evolve(outcome, seconds=round(monotonic() - begun, 1))


def _try(name: str, class_name: str, sender: Connection) -> None:
    import torch

    from rlcore_fsdp2.families.trial import try_family

    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    with tempfile.TemporaryDirectory() as directory:
        sender.send(try_family(name, class_name, Path(directory)))
