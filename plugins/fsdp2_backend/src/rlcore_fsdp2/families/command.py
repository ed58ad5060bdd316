"""The command: tries families in children, keeps the outcomes in a file, prints and writes the table."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic

from attrs import evolve

from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.results import add_outcome, code_version, known_outcomes
from rlcore_fsdp2.families.table import image_summary, images_written, merged, summary, written
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS
from rlcore_torchkit.testing.families.children import ChildError, in_child

_PRELOADED = [
    "rlcore_fsdp2.families.trial",
    "rlcore_fsdp2.backend",
    "rlcore_transformers.backend",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "pandas",  # which pyarrow imports where it is installed
]
"""Modules that children begin with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 where no family is wrong, crashes or is left out, or the one model agrees."""
    parser = argparse.ArgumentParser(prog="python -m rlcore_fsdp2.families", description="Try families of models.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="model_types to try; all by default")
    parser.add_argument("--images", action="store_true", help="try the trainer with models of text and images instead")
    parser.add_argument("--model", type=Path, metavar="DIRECTORY", help="try the model in this directory alone")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with it")
    parser.add_argument("--trainer", default="fsdp2", metavar="NAME", help="the trainer for --model (default fsdp2)")
    parser.add_argument("--results", type=Path, help="a file of outcomes: sound ones of the same code are not tried again")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose table, or rows of --only, are replaced")
    parser.add_argument("--jobs", type=int, default=2, help="families at the same time (default 2)")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="S", help="seconds for a family (default 120)")
    options = parser.parse_args(arguments)
    if options.model is not None:
        from rlcore_fsdp2.families.trial import try_model

        with tempfile.TemporaryDirectory() as scratch:
            choices = {"trust_remote_code": options.trust_remote_code, "trainer": options.trainer}
            outcome = try_model(options.model, Path(scratch), **choices)
        print(outcome.line)
        return 0 if outcome.agrees else 1
    known = image_class_names() if options.images else class_names()
    names = options.only or sorted(known)
    if unknown := sorted(set(names) - known.keys()):
        kind = "model of images" if options.images else "causal language model"
        parser.error(f"transformers has no {kind} {', '.join(unknown)}")
    if options.images and options.only and options.write is not None:
        parser.error("--images: found --only with --write; expected all classes in the table")
    outcomes = list(_tried(names, options))
    print((image_summary if options.images else summary)(outcomes))
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        write = images_written if options.images else merged if options.only else written
        options.write.write_text(write(page, outcomes), encoding="utf-8")
    if options.images:
        return 0 if all(outcome.trainer in ("agrees", "refused") for outcome in outcomes) else 1
    return 0 if all(outcome.is_sound for outcome in outcomes) else 1


def class_names() -> dict[str, str]:
    """The class of each model_type that transformers has a causal language model of, and that is none of IMAGE_MODELS."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {name: kind for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name not in IMAGE_MODELS}


def image_class_names() -> dict[str, str]:
    """The class of each model_type that transformers has a model of text and images of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _tried(names: Sequence[str], options: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes in the order of their names, those that the file of results has without a trial."""
    file: Path | None = None if options.images else options.results
    code = code_version()
    known = {} if file is None else known_outcomes(file, code)
    missing = [name for name in names if name not in known]
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for outcome in pool.map(partial(_in_child, time_limit=options.time_limit, reads_images=options.images), missing):
            known[outcome.model_type] = outcome
            print(outcome.line, file=sys.stderr, flush=True)
            if file is not None:
                add_outcome(file, code, outcome)
    yield from (known[name] for name in names)


def _in_child(name: str, time_limit: float, *, reads_images: bool = False) -> Outcome:
    """Try a family in a process of its own, which a limit of time ends."""
    begun, class_name = monotonic(), (image_class_names() if reads_images else class_names())[name]
    try:
        outcome: Outcome = in_child(_try, (name, class_name, reads_images), time_limit, preloaded=_PRELOADED)
    except ChildError as error:
        outcome = Outcome(model_type=name, class_name=class_name, trainer="crashed", trainer_reason=str(error))
    return evolve(outcome, seconds=round(monotonic() - begun, 1))


def _try(name: str, class_name: str, reads_images: bool) -> Outcome:
    from rlcore_fsdp2.families.trial import try_family, try_image_family

    with tempfile.TemporaryDirectory() as directory:
        return (try_image_family if reads_images else try_family)(name, class_name, Path(directory))
