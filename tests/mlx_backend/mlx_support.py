"""Models, decoders and contexts that several tests use."""

import json
import shutil

import numpy as np

from rlcore.spi import GeneratorContext, ModelSpec, OptimizerSpec, RankInfo, TrainerContext
from rlcore_mlx.decoder import Decoder
from rlcore_mlx.directory import load_weights
from rlcore_mlx.generator import MlxGenerator
from rlcore_mlx.provider import MlxGeneratorConfig, MlxTrainerConfig
from rlcore_mlx.trainer import MlxTrainer


def spec_of(directory, dtype="float32"):
    return ModelSpec(path=str(directory), dtype=dtype)


def loaded(directory, dtype="float32"):
    """The model and its weights."""
    decoder = Decoder.of(spec_of(directory))
    return decoder, load_weights(decoder, spec_of(directory), dtype)


def arrays(weights):
    return {name: np.array(weight) for name, weight in weights.items()}


def make_trainer(directory, dtype="float32", **options):
    context = TrainerContext(
        model=spec_of(directory, dtype),
        rank_info=RankInfo(),
        seed=0,
        num_train_steps=10,
        needs_reference=False,
        max_sequence_length=96,
        optimizer=OptimizerSpec(learning_rate=1e-3),
    )
    return MlxTrainer(context, MlxTrainerConfig(**options))


def make_generator(directory, **options):
    context = GeneratorContext(model=spec_of(directory), rank_info=RankInfo(), seed=0, max_sequence_length=96, channel=None)
    return MlxGenerator(context, MlxGeneratorConfig(**options))


def edited(directory, target, **changes):
    """A copy of a model directory with another config.json."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target
