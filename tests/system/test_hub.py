"""What a run exports has a model card, and goes to the Hub: one on this machine, by the Hub's own client."""

import json
from pathlib import Path

import pytest
import tomli
import yaml
from transformers import AutoTokenizer

from ..hub.hub_server import serving_hub  # type: ignore[import-not-found]
from .system_support import Workplace, expect_failure  # type: ignore[import-not-found]

EXPORT = ("checkpoint.export=hf", "run.num_steps=2", "evaluation.at_start=false", "checkpoint.every_n_steps=0")
CHATS = (
    "model.chat_template='{{ messages[0].content }}{% if brief %}={% endif %}'",
    "model.chat_template_kwargs={brief=true}",
)
PUSH = (*EXPORT, "checkpoint.push_to_hub=ann/sums")


def card_of(exported: Path) -> tuple[dict[str, object], str]:
    """The card's header and its text."""
    _, header, text = (exported / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_an_exported_model_tells_how_it_was_made_and_is_uploaded(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_hub(monkeypatch) as hub:
        result = workplace.rlcore("train", "grpo.toml", *PUSH, 'sinks.names=["curve"]', *CHATS)
    assert result.exit_code == 0, result.stderr
    assert f"uploaded to {hub.address}/ann/sums" in " ".join(result.stdout.split())
    run = workplace.run("run")
    assert hub.files == {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert {"README.md", "curve.png", "model.safetensors", "config.json"} <= hub.files.keys()
    header, text = card_of(run / "model")
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlcore", "grpo"],
    }
    recipe = text.split("```toml\n")[1].split("```")[0]
    assert tomli.loads(recipe) == tomli.loads((run / "recipe.toml").read_text())
    after = json.loads((run / "summary.json").read_text())["accuracy_after"]
    assert f"| held-out pass@1 after | {after:.4f} |" in text
    assert "| rlcore-grpo |" in text
    assert "![curve of the run](curve.png)" in text
    assert '{"brief": true}' in text
    exported = AutoTokenizer.from_pretrained(run / "model")
    assert exported.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "1="


def test_a_refused_upload_leaves_a_run_that_is_complete(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_hub(monkeypatch) as hub:
        hub.refuses = 403
        result = workplace.rlcore("train", "grpo.toml", *PUSH)
    message = expect_failure(result, 11, "may not write there", "The run is complete")
    assert "hf_secret" not in message
    run = workplace.run("run")
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "model" / "README.md").is_file()
    assert not (run / "model" / "curve.png").exists()


def test_what_an_upload_needs_is_told_before_the_run(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    expect_failure(workplace.rlcore("check", "grpo.toml", *PUSH), 2, "checkpoint.push_to_hub", "HF_TOKEN")
    expect_failure(
        workplace.rlcore("check", "grpo.toml", "checkpoint.push_to_hub=ann/sums"), 2, 'Set checkpoint.export to "hf"'
    )
    named = workplace.rlcore("check", "grpo.toml", *EXPORT, "checkpoint.push_to_hub=sums")
    expect_failure(named, 2, "user/name")


def test_adapters_have_a_card_of_their_own_and_none_where_none_is_wanted(workplace: Workplace) -> None:
    adapters = ("lora.rank=2", "checkpoint.export=peft", *EXPORT[1:])
    run = workplace.train("grpo.toml", *adapters, "run.name=adapters")
    header, text = card_of(run / "adapter")
    assert (header["library_name"], header["tags"]) == ("peft", ["rlcore", "grpo", "lora"])
    assert "Adapters trained" in text
    bare = workplace.train("grpo.toml", *adapters, "run.name=bare", "checkpoint.model_card=false")
    assert {path.name for path in (run / "adapter").iterdir()} - {path.name for path in (bare / "adapter").iterdir()} == {
        "README.md"
    }
