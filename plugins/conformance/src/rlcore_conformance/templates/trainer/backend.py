"""A trainer in plain torch: one rank, AdamW."""

import math

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from rlcore import spi
from rlcore_torchkit.buckets import make_buckets
from rlcore_torchkit.logprobs import packed_logprobs, patch_head
from rlcore_torchkit.losses import evaluate, total
from rlcore_torchkit.microbatch import move
from rlcore_torchkit.models import load_model
from rlcore_torchkit.trainer_hooks import save_state

STATE_FILE = "newplugin.safetensors"


class NewPlugin:
    def __init__(self, context, config):
        self.layout, self.version, self.context = spi.TrainerLayout(), 0, context
        self.device = torch.device(context.rank_info.device)
        self.model = load_model(context.model, dtype=torch.float32, device=self.device)
        patch_head(self.model)
        self.weights = dict(self.model.named_parameters())
        decay, plain = {"params": []}, {"params": [], "weight_decay": 0.0}
        for weight in self.weights.values():
            (decay if weight.ndim > 1 else plain)["params"].append(weight)
        given = {name: getattr(context.optimizer, name) for name in ("betas", "eps", "weight_decay")}
        self.optimizer = torch.optim.AdamW([decay, plain], **given)
        self.state = {name: weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            moments = {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
            self.state |= {f"{kind}/{name}": tensor for kind, tensor in self.optimizer.state[weight].items()}

    @spi.hookimpl
    def train_step(self, request):
        self.require(request.weight_version)
        self.model.zero_grad()
        totals = total([self.backward(batch, request) for batch in request.microbatches])
        loss, norm = float(totals.loss), nn.utils.get_total_norm([weight.grad for weight in self.weights.values()])
        if not math.isfinite(loss + float(norm)):
            raise spi.NonFiniteError(f"the loss is {loss}, the gradient's norm {norm}; the state before the step is kept")
        if limit := self.context.optimizer.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.weights.values(), limit, norm)
        learning_rate = self.context.learning_rate(request.schedule_step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.version += 1
        figures = {"loss": loss, "grad_norm": float(norm), "learning_rate": learning_rate}
        metrics = {name: float(value) for name, value in {**totals.sums, **totals.maxima}.items()}
        return spi.TrainStepResult(weight_version=self.version, metrics=metrics, **figures)

    @spi.hookimpl
    def get_logprobs(self, request):
        self.require(request.weight_version)
        with torch.no_grad():
            kind = "metric" if request.entropy else "none"
            pairs = [self.logprobs(move(batch, self.device, ()), request, kind) for batch in request.microbatches]
        logprobs = tuple(logprobs.cpu().numpy() for logprobs, _ in pairs)
        entropy = tuple(entropy.cpu().numpy() for _, entropy in pairs) if request.entropy else None
        return spi.LogprobsResult(logprobs=logprobs, entropy=entropy, weight_version=self.version)

    @spi.hookimpl
    def export_weights(self, request):
        self.require(request.weight_version)
        weights, dtype = self.weights.items(), getattr(torch, request.dtype)
        specs = [spi.TensorSpec(name=name, shape=tuple(each.shape), dtype=request.dtype) for name, each in weights]
        buckets = make_buckets(((name, each.detach().to(dtype)) for name, each in weights), request.max_bucket_bytes)
        kept = dtype == torch.float32  # the trainer's own memory, which a generator beside it may keep
        return spi.WeightExport(weight_version=self.version, specs=tuple(specs), buckets=buckets, persistent=kept)

    @spi.hookimpl
    def set_residency(self, request):
        return spi.SetResidencyResult(device_bytes=sum(tensor.nbytes for tensor in self.state.values()))

    @spi.hookimpl
    def save_state(self, request):
        return save_state(request, self.context, self.version, resume=self.write, export=self.export_weights)

    def write(self, directory):
        save_file(self.state, directory / STATE_FILE, {"weight_version": str(self.version)})
        return (STATE_FILE,)

    @spi.hookimpl
    def load_state(self, request):
        path = request.directory / STATE_FILE
        try:
            with safe_open(path, "pt", device=str(self.device)) as file:
                for name, tensor in self.state.items():
                    tensor.copy_(file.get_tensor(name))
                self.version = int(file.metadata()["weight_version"])
        except (OSError, SafetensorError) as error:
            raise spi.CheckpointError(f"{path} cannot be read: {error}") from error
        return spi.LoadStateResult(weight_version=self.version)

    @spi.hookimpl
    def close(self, request):
        self.model, self.optimizer, self.weights, self.state = None, None, {}, {}

    def require(self, version):
        if version != self.version:
            raise spi.ContractError(f"found weight version {version} in the request; expected {self.version}, the one held")

    def logprobs(self, batch, request, entropy):
        return packed_logprobs(self.model, batch.tokens, batch.packed, temperature=request.temperature, entropy=entropy)

    def backward(self, batch, request):
        batch = move(batch, self.device, request.loss.token_columns)
        output = evaluate(request.loss, batch, *self.logprobs(batch, request, request.loss.entropy), request.counts)
        output.loss.backward()
        return output
