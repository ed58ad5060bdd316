"""Decoders that no family describes: transformers' own class computes, and its attention reads from and writes to the cache.

Shapes: R rows (one token each), A attention heads, K key-value heads, D head size of keys, E of values, H hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from rlcore.spi import ContractError, ModelError, Problem
from rlcore_torchkit.architectures.decoders import head_scale, layer_windows
from rlcore_torchkit.forward.packing_probe import BOUNDS
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION, Scores, register_packed_attention
from rlcore_transformers.attention import Attend, PromptAttention, SlotAttention
from rlcore_transformers.cache import SlotCache

_PROMPTS, _DRAWN = (9, 12), 3
"""Tokens of the prompts of the trial, and tokens that follow each."""


class Layers:
    """The attention of one forward pass, as the layers call it one after another."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self.num_called = 0
        self.num_windows = 0
        """Layers that told their window."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        self.num_windows += scores.window is not None
        self.num_called += 1
        return self._attend(self.num_called - 1, query, key, value, scores)


class ClassDecoder:
    """`Decoder` of a model by its class in transformers, whose layers all attend and keep no other state.

    The first weights that it is bound to are tried: what it says of two random sequences, a prompt and tokens that follow one
    by one, has to be what the class says of them by itself.
    """

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """`model` is the transformers model, whose weights do not matter."""
        self._class, self._config = type(model), model.config
        self._dtype, self._device = dtype, device
        self._scale, self._cap = head_scale(model.config), getattr(model.config, "final_logit_softcapping", None)
        self._model: Any = None
        self._is_tried = False
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self.routing_shape = (0, 0)

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors from now on, as they are where the class computes with them as checkpoints have them. ModelError
        where the class lacks one or computes something else than `forward`."""
        options = {"config": self._config, "dtype": self._dtype, "attn_implementation": register_packed_attention()}
        try:
            model, loading = self._class.from_pretrained(None, state_dict=dict(weights), output_loading_info=True, **options)
        except (KeyError, ValueError) as error:  # classes with a table of their own of attentions
            self._refuse(f"{self._class.__name__}, which takes no attention of others: {error!r}")
        if loading["missing_keys"] or loading["mismatched_keys"]:
            self._refuse(
                f"weights without {min(loading['missing_keys'] or loading['mismatched_keys'])}", "all that its class has"
            )
        self._model = model.eval().requires_grad_(False).to(self._device)
        if not self._is_tried:
            try:
                self._try()
            except ModelError:
                self.unbind()
                raise
            self._is_tried = True

    def unbind(self) -> None:
        """Let go of the weights."""
        self._model = None

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, routed: Tensor | None = None) -> Tensor:
        """Final hidden states [R, H] of tokens int64 [R] at positions int64 [R]."""
        assert routed is None  # `check` refuses to replay the routing of such a model
        return self._hidden(tokens, positions, Layers(attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in the weights' dtype, from final hidden states [R, H]."""
        logits: Tensor = self._model.get_output_embeddings()(hidden) * self._scale
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits

    def _hidden(self, tokens: Tensor, positions: Tensor, layers: Layers) -> Tensor:
        # Not the module's call, which vLLM replaces in classes of transformers that its engines in this process compute with.
        output = self._model.base_model.forward(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, packed=layers
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def _try(self) -> None:
        """ModelError unless log-probabilities are those of the class alone, with transformers' own attention and masks."""
        random = torch.Generator().manual_seed(0)
        sequences = [torch.randint(self.vocab_size, (length + _DRAWN,), generator=random) for length in _PROMPTS]
        try:
            found, layers = self._cached_logits([sequence.to(self._device) for sequence in sequences])
        except (ContractError, TypeError, KeyError, AttributeError) as error:
            self._refuse(f"{self._class.__name__}, which cannot generate from this cache: {error}")
        expected = layer_windows(self._config)
        if expected is not None and layers.num_windows != expected:
            self._refuse(
                f"{expected} layers of sliding_attention, of which {layers.num_windows} tell their window to attention"
            )
        self._model.set_attn_implementation("eager")
        own = [self._model(input_ids=sequence[None].to(self._device), use_cache=False).logits[0] for sequence in sequences]
        self._model.set_attn_implementation(PACKED_ATTENTION)
        for mine, theirs, length in zip(found, own, _PROMPTS, strict=True):
            expected_logprobs = theirs[length - 1 :].float().log_softmax(-1)
            distance = (mine.float().log_softmax(-1) - expected_logprobs).abs().mean().item()
            bound = BOUNDS.get(self._dtype, BOUNDS[torch.bfloat16]) * expected_logprobs.std().item()
            if not distance <= bound:
                self._refuse(f"log-probabilities {distance:.2g} from those of its class", f"at most {bound:.2g}")
        if not layers.num_called:  # weights may be such that attention hardly matters
            self._refuse(f"{self._class.__name__}, of which no layer calls that interface")

    def _cached_logits(self, sequences: list[Tensor]) -> tuple[list[Tensor], Layers]:
        """Logits [1 + drawn, V] of each sequence from the last token of its prompt on, and the layers of the prompts."""
        count, longest = len(sequences), max(_PROMPTS)
        rows = torch.zeros((count, longest), dtype=torch.int64, device=self._device)
        for row, sequence, length in zip(rows, sequences, _PROMPTS, strict=True):
            row[:length] = sequence[:length]
        prompts = PromptAttention(count, longest)
        layers = Layers(prompts)
        hidden = self._hidden(rows.flatten(), torch.arange(longest, device=self._device).repeat(count), layers)
        lengths = torch.tensor(_PROMPTS, device=self._device)
        found = [self.logits(hidden.view(count, longest, -1)[torch.arange(count), lengths - 1])]
        cache = SlotCache(count, longest + _DRAWN)
        cache.fill(0, prompts, torch.arange(count, device=self._device))
        for step in range(_DRAWN):
            positions = lengths + step
            tokens = torch.stack([sequence[length + step] for sequence, length in zip(sequences, _PROMPTS, strict=True)])
            hidden = self._hidden(tokens, positions, Layers(SlotAttention(cache, positions, longest + step + 1)))
            found.append(self.logits(hidden))
        return list(torch.stack(found, 1)), layers

    def _refuse(
        self, found: str, expected: str = "a decoder that attends through transformers' attention interface"
    ) -> NoReturn:
        path, remedy = str(self._config.name_or_path), "Use another generator for this model."
        raise ModelError([Problem(path=path, found=found, expected=expected, remedy=remedy)])
