"""Faults of many kinds, each planted in the bad one of two runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from attrs import field, frozen
from torch import Tensor

from rlcore.spi import SamplingParams
from rlcore_fsdp2 import backend
from rlcore_rollout import from_recipe
from rlcore_torchkit.head import logprobs
from rlcore_torchkit.layers import packed_attention
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.testing.models import make_model

Sections: TypeAlias = Mapping[str, Mapping[str, Any]]
Plant: TypeAlias = Callable[[pytest.MonkeyPatch, Path], object]
SCORE = "def score(completion, answer):\n    return completion.strip() == answer\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _nothing(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave everything as it is."""


@frozen(kw_only=True)
class Fault:
    """A fault, planted in the bad run."""

    expected: tuple[str, ...]
    """The components at fault, sorted."""
    quantity: str | tuple[str, ...]
    """The first quantity that shows it; several where rounding decides."""
    both: Sections = field(factory=dict)
    """Sections of both runs' recipes. {folder} stands for a folder of the fault's own."""
    bad: Sections = field(factory=dict)
    """Sections of the bad run's alone."""
    files: Mapping[str, str] = field(factory=dict)
    """Files of that folder."""
    plant: Plant = _nothing
    """Changes code or files before the bad run."""
    stays: bool = False
    """True where the change stays while the runs are bisected: this installation has the fault."""


def _generator_at_097(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def cooler(**options: Any) -> SamplingParams:
        return SamplingParams(**{**options, "temperature": 0.97 * options["temperature"]})

    patch.setattr(from_recipe, "SamplingParams", cooler)


def _leaking(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A sequence sees the one before it in its microbatch."""
    own = packed_attention.causal_attention

    def leaks(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scores: Any) -> Tensor:
        output = own(query, key, value, packed, scores)
        if packed.num_sequences == 1:
            return output
        second = slice(int(packed.offsets[1]), int(packed.offsets[2]))
        return torch.cat([output[: second.start], output[second] + 0.1 * value[:1].mean(), output[second.stop :]])

    patch.setattr(packed_attention, "causal_attention", leaks)


def _kernel(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The fused kernels of attention are wrong; torch's plain one is right."""
    own = torch.nn.functional.scaled_dot_product_attention

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        output = own(*arguments, **options)
        return output * 1.01 if torch.backends.cuda.flash_sdp_enabled() else output

    patch.setattr(packed_attention.F, "scaled_dot_product_attention", wrong)


def _head_in_float32(patch: pytest.MonkeyPatch, folder: Path) -> None:
    own = logprobs.head_states

    def wide(caller: str, hidden: Tensor, *rest: Any) -> Tensor:
        return own(caller, hidden, *rest).float()

    patch.setattr(logprobs, "head_states", wide)


def _gradients(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The trainer loses every second number of its gradients."""
    own = backend.clip

    def wrong(gradients: Any, norm: float, max_norm: float) -> None:
        listed = list(gradients)
        own(listed, norm, max_norm)
        for gradient in listed:
            gradient.view(-1)[::2] = 0

    patch.setattr(backend, "clip", wrong)


FAULTS = {
    "a generator at 0.97 of its temperature": Fault(
        expected=("generator",), quantity="generator's log-probabilities", plant=_generator_at_097
    ),
    "another temperature": Fault(
        expected=("temperature",), quantity="generator's log-probabilities", bad={"rollout": {"temperature": 0.8}}
    ),
    "another reward function": Fault(
        expected=("reward",),
        quantity="reward",
        files={"other.py": SCORE.replace("==", "!=")},
        bad={"environment": {"function": {"path": "{folder}/other.py:score"}}},
    ),
    "a reward function that changed": Fault(
        expected=("reward",),
        quantity="reward",
        files={"score.py": SCORE},
        both={"environment": {"function": {"path": "{folder}/score.py:score"}}},
        plant=lambda _, folder: (folder / "score.py").write_text(SCORE.replace("==", "!=")),
    ),
    "another chat template": Fault(
        expected=("chat template",),
        quantity="prompt tokens",
        both={
            "model": {"chat_template": TEMPLATE},
            "environment": {"function": {"prompt_format": "chat"}},
            "rollout": {"max_prompt_tokens": 8},
        },
        bad={"model": {"chat_template": "=" + TEMPLATE}},
    ),
    "another loss denominator": Fault(
        expected=("loss denominator",),
        quantity="update 1: gradient of a tensor",
        bad={"algorithm": {"grpo": {"loss_normalisation": "constant", "constant_length": 7}}},
    ),
    "other clip bounds": Fault(
        expected=("clip bounds",), quantity="update 2: loss", bad={"algorithm": {"grpo": {"clip_low": 1e-3, "clip_high": 1e-3}}}
    ),
    "another learning rate": Fault(
        expected=("learning rate",),
        quantity="update 1: learning rate",
        bad={"optimizer": {"learning_rate": 6e-3}, "training": {"max_tokens_per_microbatch": 64}},
    ),
    "a KL weight": Fault(
        expected=("KL weight",),
        quantity="update 1: loss",
        both={"algorithm": {"grpo": {"kl_coefficient": 0.01}}},
        bad={"algorithm": {"grpo": {"kl_coefficient": 0.5}}},
    ),
    "other advantages": Fault(
        expected=("advantages",), quantity="advantages", bad={"algorithm": {"grpo": {"advantage_normalisation": "none"}}}
    ),
    "a KL weight and a loss denominator": Fault(
        expected=("KL weight", "loss denominator"),
        quantity="update 1: loss",
        both={"algorithm": {"grpo": {"kl_coefficient": 0.01}}},
        bad={
            "algorithm": {"grpo": {"kl_coefficient": 0.5, "loss_normalisation": "sequence", "clip_low": 0.1}},
            "optimizer": {"weight_decay": 0.05},
            "training": {"max_tokens_per_microbatch": 512},
        },
    ),
    "another model": Fault(
        expected=("model",),
        quantity="generator's log-probabilities",
        plant=lambda _, folder: make_model(folder / "model", alphabet="0123456789+=", max_length=32, seed=1),
        bad={"model": {"path": "{folder}/model"}},
    ),
    "weight decay": Fault(
        expected=("optimizer",), quantity="update 2: log-probabilities", bad={"optimizer": {"weight_decay": 0.5}}
    ),
    "a trainer that was patched": Fault(expected=("trainer",), quantity="weights after the step", plant=_gradients),
    "packed sequences that see each other": Fault(
        expected=("packing",), quantity="generator's log-probabilities", plant=_leaking, stays=True
    ),
    "a wrong kernel of attention": Fault(
        expected=("attention kernel",), quantity="generator's log-probabilities", plant=_kernel, stays=True
    ),
    "the head in another dtype": Fault(
        expected=("dtype of the head",),
        quantity="update 1: log-probabilities",
        both={"model": {"dtype": "bfloat16"}},
        plant=_head_in_float32,
    ),
    "another dtype": Fault(expected=("dtype",), quantity="update 1: log-probabilities", bad={"model": {"dtype": "bfloat16"}}),
    "fp8": Fault(
        expected=("fp8",),
        quantity="update 1: log-probabilities",
        both={"trainer": {"name": "fsdp2"}},
        bad={"trainer": {"fsdp2": {"fp8": True}}},
    ),
    "another trainer": Fault(
        expected=("trainer",),
        quantity=("update 1: log-probabilities", "update 1: gradient of a tensor"),
        bad={"trainer": {"name": "megatron"}},
    ),
}
