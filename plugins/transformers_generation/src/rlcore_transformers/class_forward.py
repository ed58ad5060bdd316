"""Decoders that no family describes: transformers' own class computes.

Shapes: R new tokens of B sequences, A attention heads, K key-value heads, D head size of keys, E of values, H hidden,
V vocabulary.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from rlcore.spi import ContractError, ModelError, Problem
from rlcore_torchkit.architectures.decoders import has_states, head_scale, layer_windows, logit_cap
from rlcore_torchkit.forward.decoder_forward import decoder_of, use_own_attention, vocabulary_size
from rlcore_torchkit.forward.packing_probe import BOUNDS
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION, Scores, attention_of, register_packed_attention
from rlcore_transformers.attention import Attend, PromptAttention, SlotAttention
from rlcore_transformers.cache import SlotCache
from rlcore_transformers.layer_states import CACHE_NAMES, empty_cache, layer_states, with_states

logger = logging.getLogger(__name__)
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
    """`Decoder` of a model by its class in transformers.

    Attention reads from and writes to the cache, and layers with states get theirs from it. A class that computes attention by
    itself computes each sequence anew for each token.

    The first weights that it is bound to are tried: what it says of two random sequences, a prompt and tokens that follow one
    by one, has to be what the class says of them by itself.
    """

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """`model` is the transformers model, whose weights do not matter."""
        self._class, self._config = type(model), model.config
        self._dtype, self._device = dtype, device
        self._scale, self._cap = head_scale(model.config), logit_cap(model.config)
        self._model: Any = None
        self._is_tried = False
        self._recomputes = attention_of(model.config, PACKED_ATTENTION) != PACKED_ATTENTION
        self._has_own_logits = False
        self._has_states = has_states(model)
        self._states: tuple[str, Any] | None = None
        """The name under which the class takes a cache, and a cache of no sequence, which is not empty."""
        self.vocab_size = vocabulary_size(model)
        self.routing_shape = (0, 0)

    @property
    def needs_equal_lengths(self) -> bool:
        """True where prompts that are computed together have to be of one length: padding would go into the states."""
        return self._has_states and not self._recomputes

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors from now on, as they are where the class computes with them as checkpoints have them. ModelError
        where the class lacks one or computes something else than `forward`."""
        options = {"config": self._config, "dtype": self._dtype, "state_dict": dict(weights), "output_loading_info": True}
        try:
            attention = "eager" if self._recomputes else register_packed_attention()
            model, loading = self._class.from_pretrained(None, attn_implementation=attention, **options)
        except (KeyError, ValueError):  # classes with a table of their own of attentions
            if self._recomputes:
                raise
            self._recomputes = True
            model, loading = self._class.from_pretrained(None, attn_implementation="eager", **options)
        if loading["missing_keys"] or loading["mismatched_keys"]:
            self._refuse(
                f"weights without {min(loading['missing_keys'] or loading['mismatched_keys'])}", "all that its class has"
            )
        self._model = model.eval().requires_grad_(False).to(self._device)
        if not self._is_tried:
            try:
                self._choose()
            except ModelError:
                self.unbind()
                raise
            self._is_tried = True

    def unbind(self) -> None:
        """Let go of the weights."""
        self._model = None

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, routed: Tensor | None = None) -> Tensor:
        """Final hidden states [R, H] of tokens int64 [R] at positions int64 [R], or logits [R, V] where only the class can make
        these."""
        assert routed is None  # `check` refuses to replay the routing of such a model
        if self._recomputes:
            return self._recomputed(tokens, positions, attend)
        return self._hidden(tokens, positions, attend, Layers(attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in the weights' dtype, from what `forward` returned."""
        if self._has_own_logits:
            return hidden
        logits: Tensor = self._model.get_output_embeddings()(hidden) * self._scale
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits

    def _hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, layers: Layers) -> Tensor:
        # Not the module's call, which vLLM replaces in classes of transformers that its engines in this process compute with.
        compute, count = decoder_of(self._model).forward, attend.num_rows
        if not self._has_states:
            output = compute(input_ids=tokens[None], position_ids=positions[None], use_cache=False, packed=layers)
            hidden: Tensor = output.last_hidden_state[0]
            return hidden
        rows, places = tokens.view(count, -1), positions.view(count, -1)
        name, cache = self._cache_of(attend)
        output = compute(input_ids=rows, position_ids=places, use_cache=True, packed=layers, **{name: cache})
        self._keep_states(attend, name, cache)
        hidden = output.last_hidden_state
        return hidden.flatten(0, 1)

    def _cache_of(self, attend: Attend) -> tuple[str, Any]:
        """Return the name under which the class takes a cache, and the cache with what the layers keep of these sequences."""
        if attend.states and self._states is not None:
            name, cache = self._states
            return name, with_states(cache, 0, attend.states)
        token, alone = torch.zeros((1, 1), dtype=torch.int64, device=self._device), Layers(PromptAttention(1, 1))
        output = decoder_of(self._model).forward(input_ids=token, position_ids=token, use_cache=True, packed=alone)
        found = {name: cache for name in CACHE_NAMES if (cache := getattr(output, name, None)) is not None}
        if not found:
            raise ContractError(f"{type(output).__name__}: found no cache; expected one of {', '.join(CACHE_NAMES)}")
        ((name, cache),) = found.items()
        return name, empty_cache(type(cache), self._config)

    def _keep_states(self, attend: Attend, name: str, cache: Any) -> None:
        """Have the sequences keep the states that layers left in a cache."""
        found = layer_states(cache, attend.num_rows)
        if not attend.states:
            attend.states = found
            self._states = name, with_states(cache, attend.num_rows, [states[:0] for states in found])
        for kept, states in zip(attend.states, found, strict=True):
            if kept.data_ptr() != states.data_ptr():
                kept.copy_(states)

    def _recomputed(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        rows = attend.sequences(tokens)
        compute = self._model.forward if self._has_own_logits else decoder_of(self._model).forward
        output = compute(input_ids=rows, use_cache=False)
        hidden: Tensor = output.logits if self._has_own_logits else output.last_hidden_state
        if len(tokens) == rows.numel():
            return hidden.flatten(0, 1)
        return hidden[torch.arange(len(rows), device=self._device), positions]

    def _choose(self) -> None:
        """ModelError where neither the cache nor sequences computed anew give what the class says by itself."""
        try:
            self._try()
        except ModelError:
            if not self._passes_by_itself():
                raise
        if self._recomputes:
            logger.warning("%s computes attention by itself: each token computes its whole sequence", self._class.__name__)

    def _passes_by_itself(self) -> bool:
        """Return whether sequences computed anew, and at last with the class's own logits, are right; such they are then."""
        use_own_attention(self._model)
        self._recomputes = True
        for self._has_own_logits in (False, True):
            with suppress(ModelError):
                self._try()
                return True
        return False

    @torch.no_grad()
    def _try(self) -> None:
        """ModelError unless log-probabilities are those of the class alone, with transformers' own attention and masks."""
        random = torch.Generator().manual_seed(0)
        sequences = [torch.randint(self.vocab_size, (length + _DRAWN,), generator=random) for length in _PROMPTS]
        try:
            found = self._cached_logits([sequence.to(self._device) for sequence in sequences])
            if not self._recomputes:
                self._check_layers(sequences[0].to(self._device))
        except torch.OutOfMemoryError:
            raise
        except ModelError:
            raise
        except Exception as error:  # a foreign class may raise anything on arguments that it does not know
            self._refuse(f"{self._class.__name__}, which cannot generate from this cache: {error}")
        attention = self._model.config._attn_implementation
        if not self._recomputes:
            self._model.set_attn_implementation("eager")
        own = [self._model(input_ids=sequence[None].to(self._device), use_cache=False).logits[0] for sequence in sequences]
        if not self._recomputes:
            self._model.set_attn_implementation(attention)
        for mine, theirs, length in zip(found, own, _PROMPTS, strict=True):
            expected_logprobs = theirs[length - 1 :].float().log_softmax(-1)
            distance = (mine.float().log_softmax(-1) - expected_logprobs).abs().mean().item()
            bound = BOUNDS.get(self._dtype, BOUNDS[torch.bfloat16]) * expected_logprobs.std().item()
            if not distance <= bound:
                self._refuse(f"log-probabilities {distance:.2g} from those of its class", f"at most {bound:.2g}")

    def _check_layers(self, tokens: Tensor) -> None:
        """ModelError where layers keep attention or their windows to themselves: a trial of few tokens might not show it."""
        attend = PromptAttention(1, len(tokens))
        layers = Layers(attend)
        self._hidden(tokens, torch.arange(len(tokens), device=self._device), attend, layers)
        expected = layer_windows(self._config)
        if expected is not None and layers.num_windows != expected:
            self._refuse(
                f"{expected} layers of sliding_attention, of which {layers.num_windows} tell their window to attention"
            )
        if not layers.num_called and not self._has_states:
            self._refuse(f"{self._class.__name__}, of which no layer calls that interface")

    def _cached_logits(self, sequences: list[Tensor]) -> list[Tensor]:
        """Logits [1 + drawn, V] of each sequence from the last token of its prompt on."""
        count, longest = len(sequences), max(_PROMPTS)
        lengths, cache = torch.tensor(_PROMPTS, device=self._device), SlotCache(count, longest + _DRAWN)
        groups = [[number] for number in range(count)] if self.needs_equal_lengths else [list(range(count))]
        first = []
        for group in groups:
            width = max(_PROMPTS[number] for number in group)
            rows = torch.zeros((len(group), width), dtype=torch.int64, device=self._device)
            for row, number in zip(rows, group, strict=True):
                row[: _PROMPTS[number]] = sequences[number][: _PROMPTS[number]]
            prompts = PromptAttention(len(group), width)
            hidden = self.forward(rows.flatten(), torch.arange(width, device=self._device).repeat(len(group)), prompts)
            first += [hidden.view(len(group), width, -1)[row, lengths[number] - 1] for row, number in enumerate(group)]
            cache.fill(group[0], prompts, torch.arange(len(group), device=self._device))
        found = [self.logits(torch.stack(first))]
        for step in range(_DRAWN):
            positions = lengths + step
            tokens = torch.stack([sequence[length + step] for sequence, length in zip(sequences, _PROMPTS, strict=True)])
            found.append(self.logits(self.forward(tokens, positions, SlotAttention(cache, positions, longest + step + 1))))
        return list(torch.stack(found, 1))

    def _refuse(
        self, found: str, expected: str = "a decoder that attends through transformers' attention interface"
    ) -> NoReturn:
        path, remedy = str(self._config.name_or_path), "Use another generator for this model."
        raise ModelError([Problem(path=path, found=found, expected=expected, remedy=remedy)])
