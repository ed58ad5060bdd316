"""A trainer whose checkpoints can be exported, for what serves them, and the recipe of its runs."""

import json

from attrs import evolve

from rlcore.spi import SaveStateRequest, SaveStateResult, capabilities, hookimpl
from rlcore.testing.fakes import FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer

RECIPE = """
[run]
num_steps = 2
[model]
path = "none"
chat_template = "{{ messages }}"
[algorithm]
name = "fake"
[environment]
name = "fake"
[generator]
name = "fake"
[training]
prompts_per_step = 4
[rollout]
max_prompt_tokens = 16
max_response_tokens = 8
[sinks]
names = []
[checkpoint]
every_n_steps = 1
"""


class ExportingTrainer(FakeTrainer):
    """The fake trainer with save_state(kind="hf"): a config.json with the first weight."""

    @hookimpl
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        if request.kind == "resume":
            return FakeTrainer.save_state(self, request)
        first = float(next(iter(self.weights.values())).ravel()[0])
        (request.directory / "config.json").write_text(json.dumps({"version": self.weight_version, "first": first}))
        return SaveStateResult(files=("config.json",))


TRAINER = evolve(
    FAKE_TRAINER,
    backend=f"{__name__}:ExportingTrainer",
    capabilities=FAKE_TRAINER.capabilities | {capabilities.SAVE_HF},
)
