"""A step of the recipe of self-play by a tiny model: groups are one player's, and its answers alone are trained on."""

import json
from pathlib import Path

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_grpo.provider import PROVIDER as GRPO
from rlcore_textarena.provider import PROVIDER as TEXTARENA
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS

RECIPE = Path(__file__).parents[2] / "recipes" / "tictactoe-selfplay.toml"
SHORT = ["run.num_steps=1", "run.device=cpu", "environment.textarena.max_turns=4", "environment.textarena.num_evaluation=2"]
SHORT += ["rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "training.prompts_per_step=2"]
SHORT += ["evaluation.at_start=false", "evaluation.at_end=true", "sinks.names=[]", "checkpoint.export=none"]


def test_a_step_of_self_play_and_an_evaluation(tmp_path):
    model = make_model(tmp_path / "model", max_length=2048)
    providers = {"trainer": FSDP2, "generator": TRANSFORMERS, "algorithm": GRPO, "environment": TEXTARENA}
    registry = Registry.from_providers({role: [provider] for role, provider in providers.items()})
    plan = prepare(RECIPE, [*SHORT, f"model.path={model}", f"run.directory={tmp_path / 'runs'}"], registry=registry)
    assert train(plan, resume=False, progress=Progress())["steps"] == 1
    lines = [json.loads(line) for line in next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()]
    metrics = {name: value for line in lines for name, value in line.items()}
    # 0 where the other player loses before this one is to move, as those do who have not learned to write a move
    assert 0 < metrics["environment/segments_per_episode"] <= 1
    assert {"environment/reward_player_0", "environment/reward_player_1", "environment/invalid_move"} <= metrics.keys()
    assert any(name.startswith("eval/") for name in metrics)
