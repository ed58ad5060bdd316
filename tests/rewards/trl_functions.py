"""Reward functions as TRL's users write them, and a batch; as a program, TRL's rewards of it, into trl_rewards.json."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def correct(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float | None]:
    assert len(prompts) == len(completions) == len(answer)
    assert "completion" not in kwargs
    return [None if right == "" else float(_text(one) == right) for one, right in zip(completions, answer, strict=True)]


async def short(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None if _text(one) == "?" else -0.1 * len(_text(one)) for one in completions]


def few_tokens(completion_ids: list[list[int]], completions: list[Any], level: list[int], **kwargs: Any) -> list[float | None]:
    return [None if hard > 2 else 1.0 / len(ids) for ids, hard in zip(completion_ids, level, strict=True)]


FUNCTIONS = (correct, short, few_tokens)
WEIGHTS = (1.0, 0.5, 0.25)
_ROWS = [{"answer": "5", "level": 1}, {"answer": "", "level": 1}, {"answer": "8", "level": 3}, {"answer": "", "level": 3}]
_TEXTS = ["5", "forty", "9", "?"]
_TOKENS = [[7, 1], [4, 5, 6, 1], [9, 1], [3, 1]]
BATCHES: dict[str, tuple[list[dict[str, Any]], list[str], list[list[int]]]] = {
    "text": ([{**row, "prompt": f"{number}+1?"} for number, row in enumerate(_ROWS)], _TEXTS, _TOKENS),
    "chat": (
        [{**row, "prompt": [{"role": "user", "content": f"{number}+1?"}]} for number, row in enumerate(_ROWS)],
        _TEXTS,
        _TOKENS,
    ),
}


def by_trl(form: str) -> dict[str, Any]:
    """Return the rewards [row][function], None where TRL has NaN, and TRL's weighted sums."""
    import torch
    import trl.trainer.grpo_trainer as trainer
    from accelerate import PartialState
    from trl.trainer.utils import start_event_loop_in_daemon

    PartialState(cpu=True)  # TRL's logging needs it
    _, loop, ready = start_event_loop_in_daemon(name="rewards")
    ready.wait()
    rows, texts, tokens = BATCHES[form]
    completions: list[Any] = [[{"role": "assistant", "content": text}] for text in texts] if form == "chat" else texts
    itself = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        reward_funcs=list(FUNCTIONS),
        reward_processing_classes=[None] * len(FUNCTIONS),
        reward_func_names=[function.__name__ for function in FUNCTIONS],
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
        environments=None,
        async_loop=loop,
        _log_completion_extra=None,
        _log_metric=None,
    )
    trainer.gather = lambda rewards: rewards
    prompts = [row["prompt"] for row in rows]
    rewards = vars(trainer.GRPOTrainer)["_calculate_rewards"](itself, rows, prompts, completions, tokens)
    totals = (rewards * torch.tensor(WEIGHTS)).nansum(dim=1)
    return {
        "rewards": [[None if one != one else one for one in row] for row in rewards.tolist()],
        "totals": totals.tolist(),
    }


if __name__ == "__main__":
    import trl

    found = {"version": trl.__version__, **{form: by_trl(form) for form in BATCHES}}
    (Path(__file__).parent / "trl_rewards.json").write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(0)
