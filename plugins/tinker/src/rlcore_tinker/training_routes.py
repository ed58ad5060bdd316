"""Routes of training: models, their requests, and futures."""

import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web
from attrs import frozen

from rlcore_tinker.bodies import Bodies
from rlcore_tinker.checkpoints import MAX_MODELS, Checkpoint, Checkpoints, Kind
from rlcore_tinker.clients import Clients
from rlcore_tinker.errors import RequestError, as_request_error
from rlcore_tinker.fields import LEAST_NUMBER, Fields
from rlcore_tinker.models import Models
from rlcore_tinker.ordered_requests import Work
from rlcore_tinker.promises import POLL_S, Promise, Promises, Result
from rlcore_tinker.sampling import Samplers, SamplingSession, new_sampler_id
from rlcore_tinker.tasks import Tasks
from rlcore_tinker.training_data import RawPiece
from rlcore_tinker.training_model import AdamParams, LoadRequest, SaveRequest, TrainingModel
from rlcore_tinker.weights import NamedWeights


@frozen(kw_only=True, eq=False)
class TrainingRoutes:
    """Answers requests on models under training."""

    models: Models
    clients: Clients
    samplers: Samplers
    promises: Promises
    checkpoints: Checkpoints
    bodies: Bodies
    tasks: Tasks
    on_error: Callable[[BaseException], object]

    def add_to(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Add the routes."""
        for name, handler in {
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_external": self._save_external,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_many,
            "cancel_future": self._cancel,
        }.items():
            router.add_post(f"{prefix}/{name}", handler)

    async def _create_model(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "create_model")
        session = self.clients.find(fields.text("session_id"))
        number, base = fields.integer("model_seq_id", least=0, below=MAX_MODELS), fields.text("base_model")
        metadata, lora = fields.mapping("user_metadata", {}), fields.mapping("lora_config", None)
        _check_optimizer(fields, "optimizer_config")
        self._check_base(fields, base)
        seed, rank = self._check_lora(lora)
        fields.done()
        model_id = f"{session.session_id}:train:{number}"

        async def create() -> Result:
            await self.models.create(session, number, metadata, seed=seed, rank=rank)
            return Result.json({"type": "create_model", "model_id": model_id})

        return _promised(self._begin(f"{model_id}:create", create), model_id)

    def _check_base(self, fields: Fields, base: str) -> None:
        served = self.models.served
        if base not in (served.name, served.tokenizer_id):
            fields.problem("base_model", base, f"{served.name!r}, the model of this server's recipe")

    def _check_lora(self, lora: dict[str, Any] | None) -> tuple[int | None, int | None]:
        """Return seed and rank of a model's adapters. Refuse those that the recipe's trainer does not have. Without [lora] it
        trains all weights, whatever the rank."""
        fields, served = Fields(lora or {"rank": 1}, "lora_config"), self.models.served
        rank = fields.integer("rank", least=1)
        seed: int | None = fields.integer("seed", None, least=0, below=2**63)
        fields.flag("train_unembed", True)  # no adapter of [lora] is on it, whatever is asked for
        for name in ("train_mlp", "train_attn"):
            if not fields.flag(name, True):
                fields.problem(name, False, "true: the recipe's lora.targets choose what is trained")
        if served.lora_rank is not None:
            ranks = f"{served.least_rank} to {served.lora_rank}, the recipe's lora.rank"
            if lora is None:
                fields.problem("rank", None, ranks)
            elif not served.least_rank <= rank <= served.lora_rank:
                fields.problem("rank", rank, f"{ranks}. Or start the server with lora.rank={rank}")
        fields.done()
        return seed, None if lora is None or served.lora_rank is None else rank

    async def _get_info(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "get_info")
        model = self.models.find(fields.text("model_id"))
        fields.done()
        served = self.models.served
        data = {"arch": None, "model_name": served.name, "tokenizer_id": served.tokenizer_id}
        return web.json_response(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": model.model_id,
                "optimizer_config": {"type": "adamw"},
                "is_lora": model.lora_rank is not None,
                "lora_rank": model.lora_rank,
                "model_name": served.name,
            }
        )

    async def _unload(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "unload_model")
        model = self.models.find(fields.text("model_id"))
        fields.done()

        async def unload() -> Result:
            await self.models.release(model.session_id, model.model_id)
            return Result.json({"type": "unload_model", "model_id": model.model_id})

        return _promised(self._begin(f"{model.model_id}:unload", unload), model.model_id)

    async def _forward_backward(self, request: web.Request) -> web.Response:
        raw = RawPiece.parse(await self.bodies.content(request), request.content_type)
        return self._ordered(self._model(raw.model_id), raw.seq_id, lambda model: model.forward_backward(raw))

    async def _optim_step(self, request: web.Request) -> web.Response:
        body = await self.bodies.json(request)

        async def step(model: TrainingModel) -> Result:
            return await model.optim_step(_adam(body))

        return self._ordered(*self._place(body), step)

    async def _save_weights(self, request: web.Request) -> web.Response:
        return await self._save(request, "weights", "save_weights")

    async def _save_external(self, request: web.Request) -> web.Response:
        return await self._save(request, "external_weights", "save_weights_external")

    async def _save(self, request: web.Request, kind: Kind, what: str) -> web.Response:
        body = await self.bodies.json(request)

        async def save(model: TrainingModel) -> Result:
            saved = await model.save(_save_request(body, kind, what))
            return Result.json({"type": what, "path": saved.path})

        return self._ordered(*self._place(body), save)

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        body, what = await self.bodies.json(request), "save_weights_for_sampler"

        async def save(model: TrainingModel) -> Result:
            if isinstance(body, dict) and body.get("path") is not None:
                saved = await model.save(_save_request(body, "sampler_weights", what))
                await model.weights.publish()  # so that its samplers need no other weights
                return Result.json({"type": what, "path": saved.path})
            fields = Fields(body, what)
            fields.ignored("model_id", "seq_id", "sampling_session_seq_id", "ttl_seconds", "user_metadata", "path")
            kind = fields.text("kind", "snapshot")
            if kind not in ("snapshot", "inflight"):
                fields.problem("kind", kind, "snapshot or inflight")
            fields.done()
            published = await model.weights.publish(keeps=kind == "snapshot")
            sampler = self._add_sampler(model, published if kind == "snapshot" else None)
            return Result.json({"type": what, "sampling_session_id": sampler.sampler_id})

        return self._ordered(*self._place(body), save)

    def _add_sampler(self, model: TrainingModel, weights: NamedWeights | None) -> SamplingSession:
        sampler = SamplingSession(
            sampler_id=new_sampler_id(model.session_id),
            session_id=model.session_id,
            base_model=model.served.name,
            weights=weights,
        )
        self.clients.get(model.session_id).samplers.append(sampler.sampler_id)
        return self.samplers.add(sampler)

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await self.bodies.json(request)
        if not isinstance(body, dict) or body.get("session_id") is None:

            async def load(model: TrainingModel) -> Result:
                wanted = self._load_request(body)
                await model.load(self._training_checkpoint(wanted.path), optimizer=wanted.optimizer)
                return Result.json({"type": "load_weights", "path": wanted.path, "model_id": model.model_id})

            return self._ordered(*self._place(body), load)
        wanted = self._load_request(body)
        session, number = self.clients.find(wanted.session_id), wanted.model_seq_id
        model_id = f"{session.session_id}:train:{number}"

        async def create() -> Result:
            start = self._training_checkpoint(wanted.path)
            await self.models.create(session, number, wanted.user_metadata, start, optimizer=wanted.optimizer)
            return Result.json({"type": "load_weights", "path": wanted.path, "model_id": model_id})

        return _promised(self._begin(f"{model_id}:0", create), model_id)

    def _load_request(self, body: Any) -> LoadRequest:
        """Read a request for a checkpoint in a model, new or not. RequestError with all problems."""
        fields = Fields(body, "load_weights")
        fields.ignored("weights_access_token", "seq_id", "model_id")
        session_id = fields.text("session_id", "")
        request = LoadRequest(
            path=fields.text("path"),
            optimizer=fields.flag("optimizer"),
            session_id=session_id,
            model_seq_id=fields.integer("model_seq_id", *([] if session_id else [0]), least=0, below=MAX_MODELS),
            user_metadata=fields.mapping("user_metadata", {}),
        )
        if (base := fields.text("base_model", None)) is not None:
            self._check_base(fields, base)
        _check_optimizer(fields, "optimizer_config")
        fields.done()
        return request

    def _training_checkpoint(self, path: str) -> Checkpoint:
        found = self.checkpoints.find(path)
        if found.kind != "weights":
            raise RequestError(f"path: found {path}; expected one of save_state, tinker://MODEL/weights/NAME")
        if problem := self.models.served.checkpoint_problem(found):
            raise RequestError(f"path: {problem}")
        return found

    async def _retrieve(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "retrieve_future")
        request_id = fields.text("request_id")
        fields.ignored("allow_metadata_only", "model_id")
        fields.done()
        result = await self.promises.find(request_id).wait(POLL_S)
        if result is None:
            return web.json_response({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        return web.Response(body=result.content, content_type=result.content_type)

    async def _retrieve_many(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "retrieve_futures")
        target = Fields(fields.mapping("target"), "target")
        sampler = self.samplers.find(target.text("sampling_session_id"))
        clone = target.integer("cloned_sampler_id", 0, least=0)
        cursor, timeout_s = fields.integer("prev_cursor", 0, least=0), fields.number("timeout", POLL_S, least=0)
        fields.ignored("retrieved_request_ids")
        target.done()
        fields.done()
        completions, cursor = await self.promises.ended_after((sampler.sampler_id, clone), cursor, min(timeout_s, POLL_S))
        return web.json_response({"completions": completions, "cursor": cursor})

    async def _cancel(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "cancel_future")
        request_id = fields.text("request_id")
        fields.done()
        self.promises.find(request_id)
        self.samplers.cancel(request_id)
        return web.Response(status=204)

    def _model(self, model_id: str) -> TrainingModel:
        model = self.models.find(model_id)
        self.clients.find(model.session_id)  # its client is there
        return model

    def _place(self, body: Any) -> tuple[TrainingModel, int]:
        """The model of a request, and the request's place. RequestError where either is missing."""
        known = body if isinstance(body, dict) else {}
        fields = Fields({name: known.get(name) for name in ("model_id", "seq_id")}, "request")
        model_id, seq_id = fields.text("model_id"), fields.integer("seq_id")
        fields.done()
        return self._model(model_id), seq_id

    def _ordered(self, model: TrainingModel, seq_id: int, work: Any) -> web.Response:
        bound: Work = lambda: work(model)  # noqa: E731
        return _promised(model.requests.submit(seq_id, bound), model.model_id)

    def _begin(self, request_id: str, work: Work) -> Promise:
        """Run a request outside of the order of a model's requests."""
        promise, is_new = self.promises.make(request_id)
        if is_new:

            async def run() -> None:
                try:
                    outcome: Result | RequestError = await work()
                except Exception as error:
                    self.on_error(error)
                    outcome = as_request_error(error)
                await self.promises.end(promise, outcome)

            self.tasks.start(run())
        return promise


def _promised(promise: Promise, model_id: str) -> web.Response:
    return web.json_response({"request_id": promise.request_id, "model_id": model_id})


def _check_optimizer(fields: Fields, name: str) -> None:
    found = fields.mapping(name, {})
    if found.get("type", "adamw") != "adamw":
        fields.problem(name, found, 'type "adamw", the optimizer whose settings a step may change')


def _adam(body: Any) -> AdamParams:
    fields = Fields(body, "optim_step")
    fields.ignored("model_id", "seq_id")
    if fields.any("optimizer_params") is not None:
        fields.problem("optimizer_params", fields.any("optimizer_params"), "adam_params: the model trains with AdamW")
    params = Fields(fields.mapping("adam_params", {}), "adam_params")
    betas = [params.number(name, default, least=0, below=1) for name, default in (("beta1", 0.9), ("beta2", 0.95))]
    adam = AdamParams(
        learning_rate=params.number("learning_rate", 1e-4, least=0),
        betas=(betas[0], betas[1]),
        eps=params.number("eps", 1e-12, least=LEAST_NUMBER),  # 0 divides by the moments of a gradient that is 0
        weight_decay=params.number("weight_decay", 0.0, least=0),
        max_grad_norm=params.number("grad_clip_norm", 0.0, least=0),
    )
    params.done()
    fields.done()
    return adam


def _save_request(body: Any, kind: Kind, what: str) -> SaveRequest:
    fields = Fields(body, what)
    fields.ignored("model_id", "seq_id", "sampling_session_seq_id", "kind")
    if fields.items("age_encryption_recipients", None):
        fields.problem("age_encryption_recipients", "recipients", "none: this server does not encrypt exports")
    metadata = fields.mapping("user_metadata", None)
    request = SaveRequest(
        kind=kind,
        name=fields.text("path", f"{kind}-{uuid.uuid4().hex[:12]}"),
        ttl_seconds=fields.integer("ttl_seconds", None),
        overwrite=fields.flag("overwrite", False),
        user_metadata=None if metadata is None else {str(key): str(value) for key, value in metadata.items()},
    )
    fields.done()
    return request
