"""Where the initial weights of a run come from."""

from pathlib import Path

import pytest
from megatron_weights_cases import Opened, assert_equal, in_files, write_as_megatron

from rlcore_megatron.checkpoints.cache_directory import OWN
from rlcore_megatron.checkpoints.initial import load_initial
from rlcore_megatron.setup.config import MegatronConfig


def load(model: Opened, config: MegatronConfig) -> None:
    load_initial(model.parts, model.hf, model.spec, config, model.layout)


def test_they_are_those_of_the_model_and_kept_where_the_recipe_says_so(
    directory: Path, model: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OWN, str(tmp_path / "kept"))
    load(model, MegatronConfig())
    assert_equal(model.exported(), in_files(directory))
    assert not (tmp_path / "kept").exists()
    load(model, MegatronConfig(conversion_cache=True))
    assert_equal(model.exported(), in_files(directory))
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_megatron_lm(directory: Path, model: Opened, tmp_path: Path, prefix: str) -> None:
    load(model, MegatronConfig())
    write_as_megatron(tmp_path / "megatron", model, prefix)
    load(model, MegatronConfig(pretrained_checkpoint=str(tmp_path / "megatron")))
    assert_equal(model.exported(), in_files(directory))
