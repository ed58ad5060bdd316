"""Algorithms that are GRPO with other defaults."""

import importlib
import pickle
import subprocess
import sys
from importlib.metadata import entry_points

import attrs
import numpy as np
import pytest

from rlcore.schema import describe
from rlcore.schema.structure import structure
from rlcore.spi import ADVANTAGES, CheckContext, ModelSpec
from rlcore_grpo import presets
from rlcore_grpo.check import check
from rlcore_grpo.config import GrpoConfig

from .grpo_rollouts import make_grpo, make_rollouts

PRESETS = {
    entry.name: entry.load() for entry in entry_points(group="rlcore.algorithms") if "rlcore_grpo.presets" in entry.value
}
CONTEXT = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=8)

each_preset = pytest.mark.parametrize("name", PRESETS)


def test_every_preset_has_an_entry_point():
    providers = [value for value in vars(presets).values() if isinstance(value, type(PRESETS["dapo"]))]
    assert {provider.name: provider for provider in providers} == PRESETS
    assert {"dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gdpo"} <= set(PRESETS)
    assert {"gspo", "cispo", "sapo", "gmpo", "vespo"} <= set(PRESETS)


@each_preset
def test_a_preset_takes_all_options_and_says_what_they_mean(name):
    config = PRESETS[name].config
    assert config.section == f"algorithm.{name}"
    assert describe.docs(config) == describe.docs(GrpoConfig)
    assert [field.name for field in attrs.fields(config)] == [field.name for field in attrs.fields(GrpoConfig)]
    assert attrs.asdict(config()) != attrs.asdict(GrpoConfig())
    made, problems = structure({"clip_low": 0.125, "entropy_coefficient": 0.25}, config, config.section)
    assert problems == []
    assert made == config(clip_low=0.125, entropy_coefficient=0.25)
    assert not check(CONTEXT, config())


@each_preset
def test_the_loss_of_a_preset_travels_to_workers(name):
    grpo = make_grpo(PRESETS[name].config())
    assert pickle.loads(pickle.dumps(grpo.config)) == grpo.config
    assert type(grpo.config) is PRESETS[name].config
    module, function = PRESETS[name].backend.split(":")
    assert getattr(importlib.import_module(module), function) is type(grpo)


def test_defaults_that_are_no_options_are_refused():
    with pytest.raises(TypeError, match="clip_hi"):
        presets.preset(clip_hi=0.3)


def test_presets_import_nothing_heavy():
    code = "import sys, rlcore_grpo.presets; print({'torch', 'transformers', 'numpy.linalg'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in found.stdout


def test_only_dapo_wants_dynamic_sampling():
    assert {name for name, provider in PRESETS.items() if make_grpo(provider.config()).needs.dynamic_sampling} == {"dapo"}
    assert not make_grpo().needs.dynamic_sampling


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [0.5, -0.5, 1.5, -1.5]),
        ("rloo", [1.0, -1.0, 3.0, -3.0]),
        ("maxrl", [1.0, -1.0, 1.0, -1.0]),
        ("dapo", [0.5**0.5, -(0.5**0.5), 0.5**0.5, -(0.5**0.5)]),
        ("reinforce_pp_baseline", [0.5 / 1.168, -0.5 / 1.168, 1.5 / 1.168, -1.5 / 1.168]),
    ],
)
def test_advantages_of_presets(name, expected):
    """Rewards 1 and 0, 3 and 0 in groups of two, of 3 tokens each: the deviation of the 12 tokens' advantages is 1.168."""
    training = make_grpo(PRESETS[name].config()).build_batch(make_rollouts([1, 0, 3, 0], [0, 0, 1, 1]))
    found = training.batch.token_columns[ADVANTAGES].reshape(4, 5)
    np.testing.assert_allclose(found, np.outer(expected, [0, 0, 1, 1, 1]), rtol=1e-3)


@each_preset
def test_a_constant_length_is_the_longest_response(name):
    config = make_grpo(PRESETS[name].config()).config
    assert config.constant_length == (10 if config.loss_normalisation == "constant" else None)
