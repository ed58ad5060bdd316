"""What a recipe may say of a program that measures checkpoints."""

import pytest

from rlcore.config.checkpoint_evaluation import filled

COMMAND = "checkpoint_evaluation.command=['measure', '{model}']"
AT_URL = "checkpoint_evaluation.command=['measure', '--url', '{url}']"
SERVE = "checkpoint_evaluation.serve=true"


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (("checkpoint_evaluation.wait=true",), "checkpoint_evaluation.command", "found nothing"),
        (("checkpoint_evaluation.command=[]",), "checkpoint_evaluation.command", "begin with a program"),
        (("checkpoint_evaluation.command=['m', '{modle}']",), "checkpoint_evaluation.command[1]", "did you mean 'model'"),
        ((AT_URL,), "checkpoint_evaluation.command[2]", "Set checkpoint_evaluation.serve = true"),
        ((COMMAND, "checkpoint.at_end=false"), "checkpoint_evaluation", "checkpoints to measure"),
        (
            (COMMAND, "checkpoint_evaluation.serve_arguments=['-x']"),
            "checkpoint_evaluation.serve_arguments",
            "nothing is served",
        ),
        *(
            ((COMMAND, f"checkpoint_evaluation.result_file='{file}'"), "checkpoint_evaluation.result_file", words)
            for file, words in (
                ("/tmp/r.json", "a path below {output}"),
                ("../*.json", "a path below {output}"),
                ("a**/r.json", "a path or a pattern"),
            )
        ),
        ((COMMAND, "checkpoint_evaluation.timeout_s=0"), "checkpoint_evaluation.timeout_s", "above 0"),
    ],
)
def test_what_is_wrong_is_said_at_its_key(problems, overrides: tuple[str, ...], path: str, words: str) -> None:
    found = problems("", *overrides)
    assert list(found) == [path]
    assert words in str(found[path])


@pytest.mark.parametrize(
    "overrides",
    [(COMMAND,), (AT_URL, SERVE, "checkpoint_evaluation.serve_arguments=['-x']"), (COMMAND, "checkpoint.every_n_steps=2")],
)
def test_sound_sections(load, overrides: tuple[str, ...]) -> None:
    assert load("", *overrides).checkpoint_evaluation is not None


def test_braces_that_are_no_placeholder_stay() -> None:
    command = ("m", '{"a": {step}, "b": {}}', "{model}/{step}", "{url}")
    assert filled(command, {"model": "/m", "step": 7}) == ("m", '{"a": 7, "b": {}}', "/m/7", "{url}")
