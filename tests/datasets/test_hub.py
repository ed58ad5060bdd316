"""Data sets of the Hugging Face Hub, and directories of their form."""

import json

import pytest

from rlcore.config.data import DatasetConfig
from rlcore.spi import DataError
from rlcore_datasets import provider
from rlcore_text.rows.datasets import load_rows


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("hub_cache")
def test_huggingface_directory(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"question": f"{i}+1=", "answer": i} for i in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"question": "9+9=", "answer": 18}) + "\n")
    config = DatasetConfig(source="huggingface", path=str(folder), prompt_field="question", limit=3)
    loaded = load_rows(config, "train", None)
    assert [dict(row) for row in loaded] == [{**row, "prompt": row["question"]} for row in rows[:3]]
    held_out = DatasetConfig(source="huggingface", path=str(folder), prompt_field="question", split="test")
    assert load_rows(held_out, "evaluation", None)[0]["prompt"] == "9+9="
    unknown = DatasetConfig(source="huggingface", path=str(folder), prompt_field="question", split="dev")
    with pytest.raises(DataError, match=r"data\.evaluation\.path: .*\(split 'dev'\) .* ValueError"):
        load_rows(unknown, "evaluation", None)


@pytest.mark.usefixtures("hub_cache")
def test_huggingface_name_that_is_none(tmp_path):
    config = DatasetConfig(source="huggingface", path=str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"data\.train\.path: .*nothing.* load"):
        load_rows(config, "train", None)
    with pytest.raises(DataError, match=r"data\.train\.path: found nothing"):
        load_rows(DatasetConfig(source="huggingface"), "train", None)


def test_the_hub_needs_its_package(monkeypatch):
    assert provider.HUGGINGFACE.unavailable() is None
    monkeypatch.setattr(provider, "find_spec", lambda name: None)
    assert provider.HUGGINGFACE.unavailable() == "`datasets` is not installed: pip install 'rlcore-datasets[hub]'"
