"""The policy in Megatron: GPTModel with packed sequences and a head that returns log-probabilities instead of logits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rlcore.spi import Head, ModelSpec
from rlcore_megatron.families.models import architecture_of, dims_of, standard_config
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules import delta_net, latent_attention
from rlcore_megatron.modules.attention import FusedAttention, GridRotary, PackedAttention, PackedRotary
from rlcore_megatron.modules.auxiliary_loss import BiasCorrectedRouter, PolicyRouter
from rlcore_megatron.modules.grouped_products import GroupedExperts, multiply_by_all_experts_at_once
from rlcore_megatron.modules.invariant_model import NoRotary, invariant_head, use_invariant_kernels
from rlcore_megatron.modules.model_config import local_frequencies, rotary_frequencies, scaled_frequencies, score_scale
from rlcore_megatron.modules.multi_token_head import MultiTokenHead, logprobs_ahead
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_megatron.modules.rms_norm import KeyNorm, OutputNorm, PlainRMSNorm, QueryNorm
from rlcore_megatron.modules.sparse_attention import Indexer, SparseAttention
from rlcore_megatron.modules.vision import ImageReader, add_features_behind, make_vision, place_features
from rlcore_torchkit.forward.context_parallel import part_logprobs, part_values
from rlcore_torchkit.head.logprobs import HeadLogprobs, token_logprobs
from rlcore_torchkit.head.values import token_values
from rlcore_torchkit.head.vocabulary_parallel import vocabulary_parallel_logprobs


class PolicyModel(GPTModel):
    """One model chunk: a pipeline stage, or one of its virtual stages.

    Called with a PackedBatch as `packed_seq_params`. The part with the head returns float32 [1, T], the log-probabilities of
    all of the microbatch's tokens on every context and tensor rank, or [2, T] with their entropies, and where `wanted.ahead`
    says so one row more, those of the multi-token head; with a head of values [1, T], the values after all of the tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        hf: Any,
        head: Head,
        *,
        mtp: bool = False,
        **place: Any,
    ) -> None:
        dims, family = dims_of(hf), architecture_of(hf)
        super().__init__(
            config,
            spec,
            vocab_size=dims.vocab_size,
            max_sequence_length=standard_config(hf)["max_position_embeddings"],
            share_embeddings_and_output_weights=dims.tied and head == "tokens",
            position_embedding_type="rope",
            parallel_output=True,
            **place,
        )
        self.multi_token_head = (
            MultiTokenHead(config, spec.layer_specs[-1], place["vp_stage"]) if mtp and self.post_process else None
        )
        self.vision: nn.Module | None = None
        self.reader: ImageReader | None = None
        if family.reads_images and self.pre_process:
            self.vision = make_vision(hf, config)
            add_features_behind(self.decoder.layers, family)
        self._set_rotary(hf, is_latent=dims.latent is not None)
        self._logit_cap, self._is_invariant = family.logit_cap, False
        if self.pre_process and family.scales_embeddings:
            scale = torch.tensor(dims.hidden_size**0.5).to(config.params_dtype).item()
            self.embedding.register_forward_hook(partial(_scaled, scale))
        if self.post_process:
            if head == "value":
                self.output_layer = nn.Linear(dims.hidden_size, 1, bias=False, dtype=config.params_dtype)
            # Called as a module, so that whatever gathers its weight before it is used goes on doing so.
            self.output_layer.forward = self._values if head == "value" else self._logprobs

    def _set_rotary(self, hf: Any, *, is_latent: bool) -> None:
        """Have layers take angles of packed sequences; those with multi-latent attention each have them by themselves."""
        device = torch.cuda.current_device()
        if is_latent:
            frequencies, scale = scaled_frequencies(hf)
            heads = [] if self.multi_token_head is None else [self.multi_token_head.transformer_layer]
            rotary = latent_attention.LatentRotary(frequencies.to(device), scale)
            latent_attention.finish([*self.decoder.layers, *heads], rotary)
            self._add_indexers(hf, rotary)
        else:
            family, frequencies = architecture_of(hf), rotary_frequencies(hf).to(device)
            sections, interleaved = family.rotary_sections, family.has_interleaved_sections
            self.rotary_pos_emb = (
                GridRotary(frequencies, sections, interleaved=interleaved) if sections else PackedRotary(frequencies)
            )
            self._set_local_rotary(hf, device)

    def _add_indexers(self, hf: Any, rotary: latent_attention.LatentRotary) -> None:
        """Give layers that choose keys their indexers."""
        dims, family = dims_of(hf), architecture_of(hf)
        if dims.indexer is None or dims.latent is None:
            return
        for layer in self.decoder.layers:
            if dims.indexer.layers[layer.layer_number - 1]:
                kind = {"interleaved": family.has_interleaved_indexers}
                attention = layer.self_attention
                attention.indexer = Indexer(self.config, dims.latent, dims.indexer, rotary, **kind)
                attention.indexer.watch(attention, layer.layer_number)

    def _set_local_rotary(self, hf: Any, device: Any) -> None:
        """Have layers that see windows rotate by angles of their own, in families that have such."""
        frequencies, windows = local_frequencies(hf), architecture_of(hf).windows
        if frequencies is None:
            return
        self.local_rotary = PackedRotary(frequencies.to(device))
        for layer in self.decoder.layers:
            if windows[layer.layer_number - 1] is not None:
                rotate = partial(_rotated_locally, self.local_rotary)
                layer.self_attention.register_forward_pre_hook(rotate, with_kwargs=True)

    def use_invariant_kernels(self, hf: Any, parts: int) -> None:
        """Compute as a batch-invariant engine of `parts` ranks does. `hf` is the transformers config."""
        use_invariant_kernels(self.decoder, hf, parts)
        self.rotary_pos_emb, self._is_invariant = NoRotary(), True

    def forward(self, *inputs: Any, packed_seq_params: PackedBatch, **options: Any) -> Tensor:
        """Return GPTModel's output, with the features of images in the places of their placeholders."""
        if self.vision is not None:
            options["decoder_input"] = self._with_images(self.vision, packed_seq_params)
        output: Tensor = super().forward(*inputs, packed_seq_params=packed_seq_params, **options)
        return output

    def _with_images(self, vision: nn.Module, batch: PackedBatch) -> Tensor:
        assert batch.part is not None
        embeddings = self.embedding(input_ids=batch.tokens, position_ids=None)
        part, group = batch.part, self.pg_collection.tp
        if self.config.sequence_parallel:
            ranks = {"rank": part.rank * group.size() + group.rank(), "num_ranks": part.num_ranks * group.size()}
            part = evolve(part, **ranks, size=len(embeddings))
        return place_features(vision, embeddings, batch, part)

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedBatch, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        result: Tensor = self.output_layer(hidden_states, packed_seq_params)
        return result

    def _logprobs(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        part, microbatch, wanted = batch.part, batch.batch, batch.wanted
        assert part is not None
        assert microbatch is not None
        assert wanted is not None
        logprobs, entropies = part_logprobs(
            self._of_all_ranks(hidden),
            microbatch.tokens,
            part,
            self._head(),
            temperature=wanted.temperature,
            entropy=wanted.entropy,
            kept=microbatch.kept,
        )
        rows = [logprobs] if entropies is None else [logprobs, entropies]
        return torch.stack([*rows, self._logprobs_ahead(hidden, batch)] if wanted.ahead else rows)

    def _logprobs_ahead(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        assert self.multi_token_head is not None
        rotary = None if self.config.multi_latent_attention else self.rotary_pos_emb(batch)
        states = self.multi_token_head(hidden, batch, rotary)
        return logprobs_ahead(self._of_all_ranks(states), batch, self._head(detached=True))

    def _of_all_ranks(self, hidden: Tensor) -> Tensor:
        """[S, H] of all tensor ranks' tokens, whose gradient is added up over what each computes of them, unless each computes
        all."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.pg_collection.tp)
        elif self.pg_collection.tp.size() > 1 and not self._is_invariant:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)
        return hidden.squeeze(1)

    def _values(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Every tensor rank computes all of them, so that its gradients are whole already."""
        assert batch.part is not None
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        values = token_values(hidden.squeeze(1)[: batch.part.size], self.output_layer.weight)
        return part_values(values, batch.part)[None]

    def _head(self, *, detached: bool = False) -> HeadLogprobs:
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        weight = weight.detach() if detached else weight
        group = self.pg_collection.tp
        if self._is_invariant:
            return invariant_head(weight, group)
        if group.size() == 1:
            return partial(token_logprobs, weight=weight, cap=self._logit_cap)
        first = group.rank() * weight.shape[0]
        return partial(vocabulary_parallel_logprobs, weight=weight, first=first, group=group, cap=self._logit_cap)


def _scaled(scale: float, _: Any, __: Any, embeddings: Tensor) -> Tensor:
    return embeddings * scale


def _rotated_locally(rotary: PackedRotary, _: Any, states: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return states, options | {"rotary_pos_emb": rotary(options["packed_seq_params"])}


def release_graphs(models: Sequence[torch.nn.Module]) -> None:
    """Take from token dispatchers what they keep of their last pass; the models cannot be called after that.

    It has a graph, and in that the hooks of parameters lead back to the model: a cycle that Python's collector cannot see. It
    would keep the model's memory, and its process groups with their threads.
    """
    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "token_dispatcher"):
            vars(module.token_dispatcher).clear()


def build(
    config: TransformerConfig,
    hf: Any,
    layout: ParallelLayout,
    head: Head = "tokens",
    *,
    mtp: bool = False,
    invariant_parts: int | None = None,
) -> list[PolicyModel]:
    """This rank's model chunks of the model, in the order that interleaving runs them in, with weights that are not set.

    `hf` is the transformers config; `mtp` says whether the last chunk has a multi-token head. With `invariant_parts` layers
    compute by batch-invariant kernels, as an engine of so many ranks does.
    """
    if config.num_moe_experts and config.moe_grouped_gemm:
        multiply_by_all_experts_at_once(torch.cuda.get_device_capability())
    model_chunks = []
    for index in range(layout.virtual_pipeline):
        stage = index if layout.virtual_pipeline > 1 else None
        fused = config.transformer_impl == "transformer_engine"
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=fused, normalization="RMSNorm", vp_stage=stage)
        _adapt(spec, hf, config, fused)
        first_layer = get_transformer_layer_offset(config, stage)
        if has_delta := dims_of(hf).has_delta[first_layer : first_layer + len(spec.layer_specs)]:
            spec.layer_specs = list(map(delta_net.in_place_of_attention, spec.layer_specs, has_delta))
        first, last = layout.is_first_stage and index == 0, layout.is_last_stage and index == layout.virtual_pipeline - 1
        model = PolicyModel(config, spec, hf, head, mtp=mtp, pre_process=first, post_process=last, vp_stage=stage)
        if invariant_parts is not None:
            model.use_invariant_kernels(hf, invariant_parts)
        model_chunks.append(model.to(torch.cuda.current_device()))
    _mark_experts(model_chunks, layout)
    mark_whole_weights(model_chunks)
    _mend_biases_of_experts(model_chunks)
    return model_chunks


def mark_whole_weights(model_chunks: Sequence[nn.Module]) -> None:
    """Have Megatron count weights that every tensor rank holds whole once in the gradient's norm.

    TransformerEngine marks the weights of all its linear layers as divided. Experts are marked after this. Shared experts are
    divided though they have no mode where Megatron gathers their tokens itself, as `moe_shared_expert_overlap` has it do.
    """
    for name, module in (named for model_chunk in model_chunks for named in model_chunk.named_modules()):
        if getattr(module, "parallel_mode", "column") is None and ".shared_experts." not in name:
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def _mend_biases_of_experts(model_chunks: Sequence[PolicyModel]) -> None:
    """Mend the biases of single experts: Megatron adds them in place to a view, adds up their gradients once too often under
    sequence parallelism, and divides their norm otherwise than their state."""
    for model_chunk in model_chunks:
        for name, parameter in model_chunk.named_parameters():
            if ".experts." in name:
                parameter.sequence_parallel = False  # type: ignore[attr-defined]
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        for name, module in model_chunk.named_modules():
            if ".local_experts." in name and name.endswith(".linear_fc2") and module.bias is not None:
                module.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))


def _mark_experts(model_chunks: Sequence[PolicyModel], layout: ParallelLayout) -> None:
    """Have the experts' gradients added up over all ranks that hold the same experts.

    Megatron does so only with expert parallelism; without, it takes the group of the other weights, which leaves out tensor
    ranks that each send their own tokens through whole experts.
    """
    if layout.expert > 1 or layout.expert_tensor == layout.tensor:
        return
    for model_chunk in model_chunks:
        for name, parameter in model_chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def _adapt(spec: TransformerBlockSubmodules, hf: Any, config: TransformerConfig, fused: bool) -> None:
    """Put our attention, routers, norms behind attention and MLP, and without TransformerEngine all norms, in place of
    Megatron's."""
    family, core = architecture_of(hf), FusedAttention
    if family.needs_general_attention or not fused:
        scale = score_scale(hf) if family.needs_general_attention else None
        # No partial: Megatron builds the core of latent attention by build_module.
        core = ModuleSpec(module=PackedAttention, params={"family": family, "scale": scale})
    if family.indexed:
        core = ModuleSpec(module=SparseAttention, params={"family": family})
    normed = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    for layer in spec.layer_specs:
        mlp = _submodules(layer.submodules.mlp)
        if hasattr(mlp, "router"):
            mlp.router = BiasCorrectedRouter if family.has_correction_bias else PolicyRouter
            mlp.experts = _with_grouped_experts(mlp.experts)
        if not fused and layer.submodules.self_attention.module is MLASelfAttention:
            layer.submodules.self_attention.module = latent_attention.LatentAttention
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = core
        if family.has_output_norms:
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = ModuleSpec(module=OutputNorm, params=normed)
        if not fused:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainRMSNorm
            for name in ("q_layernorm", "k_layernorm"):
                if _is_norm(getattr(attention, name, None)):
                    setattr(attention, name, PlainRMSNorm)
        if dims_of(hf).has_wide_norms:
            attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    if not fused:
        spec.layer_norm = PlainRMSNorm


def _submodules(spec: Any) -> Any:
    """The parts of an MLP's specification: a ModuleSpec in Megatron-Core 0.16, a partial of its class in later versions."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _with_grouped_experts(experts: Any) -> Any:
    """The specification of experts, with our class in place of Megatron's grouped one."""
    if isinstance(experts, partial):
        return partial(GroupedExperts, **experts.keywords) if experts.func is TEGroupedMLP else experts
    if experts.module is TEGroupedMLP:
        experts.module = GroupedExperts
    return experts


def _is_norm(module: Any) -> bool:
    return "Norm" in getattr(module, "__name__", "")


def read_images(model_chunks: Sequence[PolicyModel], hf: Any, spec: ModelSpec) -> None:
    """Have the chunks of the model at `spec` take images, where its family reads some. ModelError where the model has no image
    processor."""
    if architecture_of(hf).reads_images:
        reader = ImageReader.of(hf, spec)
        for model_chunk in model_chunks:
            model_chunk.reader = reader


def freeze_vision(model_chunks: Sequence[PolicyModel]) -> None:
    """Train nothing of the vision tower, what projects its output among it."""
    for model_chunk in model_chunks:
        if model_chunk.vision is not None:
            model_chunk.vision.requires_grad_(False)


def unwrapped(models: Sequence[Any]) -> list[PolicyModel]:
    """The model chunks without what wraps them for data parallelism."""
    return [getattr(model, "module", model) for model in models]
