"""The section `[checkpoint_evaluation]`: a program of the user's that measures checkpoints."""

from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Count, Positive, Seconds, Text

_PROGRAM = Constraint("that begin with a program", lambda value: bool(value) and bool(value[0].strip()))


@frozen(kw_only=True)
class CheckpointEvaluationConfig:
    """`[checkpoint_evaluation]`: a program that measures checkpoints while the training goes on. Its figures are the metrics
    `checkpoint_eval/NAME` of the checkpoint's step, in metrics.jsonl and in sinks. Where it fails, a note says so, and the run
    goes on."""

    command: Annotated[tuple[str, ...], _PROGRAM]
    """The program and its arguments, started in the run's working directory. Placeholders: {model} is the directory of the
    checkpoint's model in the Hugging Face format, {step} the step, {run_directory} the run's, {output} an empty directory for
    the program's files. With `serve`, {port} and {url} are those of the server, http://127.0.0.1:PORT/v1."""
    every_n_checkpoints: Positive = 1
    """Measure every n-th checkpoint, and the last."""
    serve: bool = False
    """Start `rlcore serve` on the model, as "policy", for the time that the program runs."""
    serve_arguments: tuple[Text, ...] = ()
    """Further arguments of `rlcore serve`, such as "--generator", "transformers" or "model.dtype=float32"."""
    environment: Mapping[str, str] = field(factory=dict)
    """Environment variables to set for program and server, such as CUDA_VISIBLE_DEVICES. Pass the key of an API with
    `pass_environment` instead, since the recipe is a file."""
    pass_environment: tuple[Text, ...] = ()
    """Names of further environment variables of the run that the program gets. It always gets those that programs need, such as
    PATH, HOME and LANG. The server gets all variables of the run."""
    result_file: Text | None = None
    """The file into which the program writes its metrics as JSON: a path below {output}, or a pattern such as
    "**/results_*.json", of which the newest file counts. None is its standard output, of which the last line with a JSON object
    counts."""
    result_key: Text | None = None
    """The key of that JSON object which holds the metrics, such as "results", or "scores.0" for the first of the list scores.
    Names of nested objects are joined by "/"; values that are no numbers are ignored."""
    timeout_s: Seconds = 3600.0
    """Most seconds for one checkpoint, the start of the server included; then all that was started is killed."""
    wait: bool = False
    """Wait for the figures before the next step, in place of training meanwhile."""
    max_waiting: Count = 2
    """Most checkpoints that wait while another one is evaluated, each with its model on disk. A further one is not evaluated,
    with a note, unless it is the run's last."""
