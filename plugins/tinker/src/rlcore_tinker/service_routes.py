"""Routes of the service: versions, sessions, sampling sessions, samples."""

from typing import Any

from aiohttp import web
from attrs import frozen

from rlcore_tinker.bodies import Bodies
from rlcore_tinker.checkpoints import Checkpoints
from rlcore_tinker.clients import Clients
from rlcore_tinker.errors import RequestError
from rlcore_tinker.fields import Fields
from rlcore_tinker.models import Models
from rlcore_tinker.sampling import Samplers, SamplingSession, new_sampler_id
from rlcore_tinker.versions import check_version
from rlcore_tinker.weights import BASE, NamedWeights

HEALTH = "health"
"""The name of the route that says whether the server runs."""


@frozen(kw_only=True, eq=False)
class ServiceRoutes:
    """Answers requests on sessions and samples."""

    models: Models
    clients: Clients
    samplers: Samplers
    checkpoints: Checkpoints
    bodies: Bodies

    def add_to(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Add the routes."""
        router.add_get(f"{prefix}/healthz", self._health, name=HEALTH)
        router.add_get(f"{prefix}/get_server_capabilities", self._capabilities)
        router.add_post(f"{prefix}/client/config", self._config)
        router.add_post(f"{prefix}/client/dynamic_config", self._config)
        router.add_post(f"{prefix}/create_session", self._create_session)
        router.add_post(f"{prefix}/session_heartbeat", self._heartbeat)
        router.add_post(f"{prefix}/telemetry", self._telemetry)
        router.add_get(f"{prefix}/sessions", self._sessions)
        router.add_get(f"{prefix}/sessions/{{session}}", self._session)
        router.add_post(f"{prefix}/sessions/{{session}}/finish", self._finish)
        router.add_post(f"{prefix}/create_sampling_session", self._create_sampler)
        router.add_post(f"{prefix}/join_sampling_session", self._join)
        router.add_get(f"{prefix}/samplers/{{sampler}}", self._sampler)
        router.add_post(f"{prefix}/asample", self._sample)

    async def _health(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response({"status": "ok"})

    async def _capabilities(self, request: web.Request) -> web.Response:  # noqa: ARG002
        served = self.models.served
        model = {
            "model_name": served.name,
            "max_context_length": served.limits.max_sequence_length,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _config(self, request: web.Request) -> web.Response:
        """Answer both configurations of the client: its defaults, with samples that can be cancelled."""
        fields = Fields(await self.bodies.json(request), "client_config")
        check_version(fields.text("sdk_version"))
        fields.done()
        return web.json_response(
            {"sample_cancel_enabled": True, "parallel_fwdbwd_chunks": True, "custom_loss_server_side": False}
        )

    async def _create_session(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "create_session")
        warning = check_version(fields.text("sdk_version"))
        fields.ignored("tags", "project_id")
        metadata, name = fields.mapping("user_metadata", {}), fields.text("display_name", None)
        fields.done()
        session = self.clients.begin(metadata, name)
        served = self.models.served
        info = (
            None
            if served.lora_rank is not None
            else "the server's recipe has no [lora]: all weights are trained, whatever the rank"
        )
        return web.json_response(
            {"type": "create_session", "session_id": session.session_id, "info_message": info, "warning_message": warning}
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "session_heartbeat")
        self.clients.find(fields.text("session_id"))
        fields.done()
        return web.json_response({"type": "session_heartbeat"})

    async def _telemetry(self, request: web.Request) -> web.Response:
        """Accept the client's telemetry, and drop it."""
        await self.bodies.content(request)
        return web.json_response({"status": "accepted"})

    async def _sessions(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response({"sessions": self.clients.ids()})

    async def _session(self, request: web.Request) -> web.Response:
        session = self.clients.get(request.match_info["session"])
        return web.json_response(
            {
                "training_run_ids": session.models,
                "sampler_ids": session.samplers,
                "user_metadata": {key: str(value) for key, value in session.user_metadata.items()},
                "display_name": session.display_name,
            }
        )

    async def _finish(self, request: web.Request) -> web.Response:
        session = self.clients.get(request.match_info["session"])
        session.is_finished = True
        await self.models.release(session.session_id)
        return web.Response(status=204)

    async def _create_sampler(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "create_sampling_session")
        session = self.clients.find(fields.text("session_id"))
        fields.integer("sampling_session_seq_id", least=0)
        base, path = fields.text("base_model", None), fields.text("model_path", None)
        served = self.models.served
        if base not in (None, served.name, served.tokenizer_id):
            fields.problem("base_model", base, f"{served.name!r}, the model of this server's recipe")
        if base is None and path is None:
            fields.problem("base_model", None, "a base_model, or a model_path")
        fields.done()
        sampler = SamplingSession(
            sampler_id=new_sampler_id(session.session_id),
            session_id=session.session_id,
            base_model=served.name,
            weights=NamedWeights(name=BASE) if path is None else self._saved(path),
            model_path=path,
        )
        session.samplers.append(sampler.sampler_id)
        self.samplers.add(sampler)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id})

    def _saved(self, path: str) -> NamedWeights:
        """The weights of a checkpoint. RequestError where there is none, or it is another model's or an export."""
        found = self.checkpoints.find(path)
        problem = self.models.served.checkpoint_problem(found)
        if found.kind == "external_weights":
            problem = f"found {path}, an export; expected weights or sampler_weights"
        if problem is not None:
            raise RequestError(f"model_path: {problem}")
        return NamedWeights(name=found.weights, files=found.files)

    async def _join(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "join_sampling_session")
        sampler = self.samplers.find(fields.text("sampling_session_id"))
        fields.done()
        sampler.num_clones += 1
        return web.json_response({"type": "join_sampling_session", "client_counter": sampler.num_clones})

    async def _sampler(self, request: web.Request) -> web.Response:
        found = self.samplers.find(request.match_info["sampler"])
        return web.json_response(
            {"sampler_id": found.sampler_id, "base_model": found.base_model, "model_path": found.model_path}
        )

    async def _sample(self, request: web.Request) -> web.Response:
        body: Any = await self.bodies.json(request)
        known = body if isinstance(body, dict) else {}
        fields = Fields({name: known.get(name) for name in ("sampling_session_id", "seq_id")}, "asample")
        sampler_id, seq_id = fields.text("sampling_session_id"), fields.integer("seq_id", least=0)
        fields.done()
        sampler = self.samplers.find(sampler_id)
        self.clients.find(sampler.session_id)
        promise, sequences = self.samplers.submit(sampler, seq_id, body)
        return web.json_response({"request_id": promise.request_id, "sample_sequence_ids": sequences})
