"""Write trl_self_numbers.json: losses of sampled tokens and teachers' prompts, as TRL's SDFT and SDPO make them.

    python tests/distill/make_trl_self_numbers.py

needs trl 1.16.0 and torch, and nothing of rlcore. The builders of prompts are called with a stand-in for their trainer. Its
tokenizer gives each character its code point as the token, and 0 is padding.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.experimental.sdft.loss_utils import (
    apply_importance_sampling_clipping,
    compute_sampled_token_self_distillation_loss,
)
from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder
from trl.experimental.sdpo.sdpo_config import SDPOConfig
from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

POSITIONS, VOCABULARY = 5, 6
PROMPTS = ["1+1=", "2+2=", "3+3="]
COMPLETIONS = [["2", "3", "2 "], ["5", "6", "7"], ["5", "6", "60"]]
REWARDS = [[1.0, 0.0, 1.0], [0.0, 0.5, 0.0], [0.0, 1.0, 0.0]]
FEEDBACKS = ["", "too large", "even"]


def main() -> None:
    found = {"trl": trl.__version__, "loss": _loss(), "sdft": _sdft()}
    found |= {"prompts": PROMPTS, "completions": COMPLETIONS, "rewards": REWARDS, "feedbacks": FEEDBACKS}
    found |= {"sdpo": _sdpo(None), "sdpo_with_feedback": _sdpo(FEEDBACKS)}
    Path(__file__).with_name("trl_self_numbers.json").write_text(json.dumps(found, indent=1) + "\n")


def _loss() -> dict[str, object]:
    torch.manual_seed(0)
    student = 1.5 * torch.randn(1, POSITIONS, VOCABULARY, dtype=torch.float64)
    teacher = 1.5 * torch.randn(1, POSITIONS, VOCABULARY, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (1, POSITIONS))
    leaf = student.clone().requires_grad_()
    own = leaf.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    old = own.detach() - torch.tensor([[0.0, 0.3, -0.4, 1.5, 0.1]], dtype=torch.float64)
    per_token = compute_sampled_token_self_distillation_loss(leaf, teacher, tokens, distillation_alpha=1.0)
    apply_importance_sampling_clipping(per_token, own, old, 2.0).sum().backward()
    return {
        "student": student[0].tolist(),
        "teacher": teacher[0].tolist(),
        "tokens": tokens[0].tolist(),
        "old": old[0].tolist(),
        "gradient": leaf.grad[0].tolist(),
    }


def _sdft() -> list[str]:
    builder = DemonstrationTeacherContextBuilder(
        SimpleNamespace(args=SimpleNamespace(teacher_prompt_template="{prompt}\n\n{privileged_context}"))
    )
    return [builder._compose_teacher_prompt(prompt, "like " + prompt) for prompt in PROMPTS]


def _sdpo(feedbacks: list[str] | None) -> dict[str, object]:
    told: list[str] = []
    options = {name: field.default for name, field in SDPOConfig.__dataclass_fields__.items()}
    options |= {"include_environment_feedback": feedbacks is not None}
    tokenizer = SimpleNamespace(
        pad_token_id=0, decode=lambda tokens, **_: "".join(chr(int(token)) for token in tokens if token)
    )
    trainer = SimpleNamespace(
        args=SimpleNamespace(**options),
        num_generations=len(COMPLETIONS[0]),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            device="cpu", process_index=0, gather=lambda values: values, pad_across_processes=lambda values, **_: values
        ),
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        _tokenize_prompts_untruncated=lambda texts: told.extend(texts) or [[1] for _ in texts],
    )
    texts = [text for group in COMPLETIONS for text in group]
    width = max(map(len, texts))
    ids = torch.tensor([[ord(letter) for letter in text] + [0] * (width - len(text)) for text in texts])
    prompts = [prompt for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True) for _ in group]
    told_of = None if feedbacks is None else [one for one, group in zip(feedbacks, COMPLETIONS, strict=True) for _ in group]
    rewards = torch.tensor([reward for group in REWARDS for reward in group])
    built = SuccessfulRolloutTeacherContextBuilder(trainer).build(
        {"completion_ids": ids, "completion_mask": (ids > 0).long()}, prompts, rewards, told_of
    )
    return {"prompts": told, "mask": built["self_distillation_mask"].tolist()}


if __name__ == "__main__":
    import trl.experimental.sdpo.sdpo_trainer as module

    module.gather_object = lambda values: values
    main()
