"""The head that predicts the token after the next by its formula (arXiv:2412.19437, section 2.2), with transformers' layer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron_families import FIXED, make_own
from megatron_support import OPTIMIZER, TEMPERATURE, Reference, in_files
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe

from rlcore.spi import OptimizerSpec, TokenBatch

LAYERS = {"deepseek_v3": modeling_deepseek_v3.DeepseekV3DecoderLayer, "glm4_moe": modeling_glm4_moe.Glm4MoeDecoderLayer}
SHARED = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
"""What the files have of the trunk once more, for the head."""


class HeadReference(nn.Module):
    """Names of its parameters are those of the files behind `model.layers.N.`, but for those of a decoder's layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm, self.hnorm = nn.RMSNorm(size, config.rms_norm_eps), nn.RMSNorm(size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = LAYERS[config.model_type](config, layer_idx=config.num_hidden_layers)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)

    def losses(self, trunk: Any, tokens: torch.Tensor) -> torch.Tensor:
        """float [T]: -log p of each token of a sequence int64 [T] from the state two before it; 0.0 at the first two."""
        decoder, length = trunk.model, len(tokens)
        if length < 3:
            return torch.zeros(length)
        with torch.no_grad():
            hidden = decoder(tokens[None], use_cache=False).last_hidden_state[0]
            following = decoder.embed_tokens(tokens[1:])
            angles = decoder.rotary_emb(hidden[None], torch.arange(length - 1)[None])
        states = self.eh_proj(torch.cat([self.enorm(following), self.hnorm(hidden[:-1])], -1))
        mask = torch.full((length - 1, length - 1), -torch.inf).triu(1)[None, None]
        output = self.layer(states[None], attention_mask=mask.to(states), position_embeddings=angles)
        logits = self.norm(output[0] if output.ndim == 3 else output)[:-1] @ trunk.lm_head.weight.detach().T
        found = nn.functional.cross_entropy(logits / TEMPERATURE, tokens[2:], reduction="none")
        return torch.cat([torch.zeros(2), found])

    def in_files(self, trunk: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the names of the files, from parameters' own."""
        prefix = f"model.layers.{trunk.config.num_hidden_layers}."
        names = {"norm.weight": "shared_head.norm.weight"}
        return in_files(
            trunk, {f"{prefix}{names.get(name, name).removeprefix('layer.')}": tensor for name, tensor in tensors.items()}
        )

    def of_files(self, trunk: Any) -> dict[str, torch.Tensor]:
        """All that the files hold for the head, as it is now."""
        prefix = f"model.layers.{trunk.config.num_hidden_layers}."
        shared = {f"{prefix}{copy}.weight": trunk.state_dict()[name].clone() for copy, name in SHARED.items()}
        return {**self.in_files(trunk, self.state_dict()), **shared}


def make_head(config: Any) -> HeadReference:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = HeadReference(config)
        with torch.no_grad():
            for name, tensor in head.state_dict().items():
                tensor.normal_(std=0.08) if tensor.ndim > 1 else tensor.uniform_(-0.1, 0.1)
                if tensor.ndim == 1 and not name.endswith(FIXED):
                    tensor.add_(1.0)
    return head


def make_with_head(directory: Path, name: str, **options: Any) -> Path:
    """Write a model of a family with a multi-token head in its files; returns the directory."""
    make_own(directory, name, num_nextn_predict_layers=1, **options)
    reference = Reference(directory)
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **make_head(reference.model.config).of_files(reference.model)}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return directory


def expected_head(directory: Path, batches: Sequence[TokenBatch], step: Any, spec: OptimizerSpec = OPTIMIZER) -> dict[str, Any]:
    """Loss, gradient and its norm of each step, and weights after all, above the trunk at `directory`, which `step` trains."""
    reference = Reference(directory, spec)
    head = make_head(AutoConfig.from_pretrained(directory, attn_implementation="eager"))
    matrices, vectors = ([p for p in head.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, foreach=False)
    losses, norms, gradients = [], [], []
    for batch in batches:
        sequences = torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist())
        found = torch.cat([head.losses(reference.model, tokens) for tokens in sequences])
        loss = found[torch.from_numpy(batch.loss_mask)].sum() / batch.counts().num_loss_tokens
        (0.1 * loss).backward()
        losses.append(loss.item())
        gradients.append(head.in_files(reference.model, {name: p.grad.clone() for name, p in head.named_parameters()}))
        norms.append(nn.utils.clip_grad_norm_(head.parameters(), spec.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        step(reference, batch)
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": head.of_files(reference.model)}
