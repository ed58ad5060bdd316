"""Routes of checkpoints: listed, published, deleted, given a time to live, and downloaded file by file."""

import hashlib
import hmac
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from attrs import frozen

from rlcore_tinker.bodies import Bodies
from rlcore_tinker.checkpoints import Checkpoint, Checkpoints, expiry, files_of
from rlcore_tinker.errors import RequestError
from rlcore_tinker.fields import Fields
from rlcore_tinker.models import Models

FILE = "file"
"""The name of the route of files."""
URL_S = 3600
"""Seconds for which the address of a file is valid."""
OWNER = "local"
PAGE = 100


@frozen(kw_only=True, eq=False)
class CheckpointRoutes:
    """Answers requests on checkpoints. `secret` signs the addresses of files."""

    models: Models
    checkpoints: Checkpoints
    bodies: Bodies
    secret: bytes

    def add_to(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Add the routes."""
        one = f"{prefix}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"
        router.add_get(f"{prefix}/checkpoints", self._list_all)
        router.add_get(f"{prefix}/training_runs", self._runs)
        router.add_get(f"{prefix}/training_runs/{{model}}", self._run)
        router.add_get(f"{prefix}/training_runs/{{model}}/checkpoints", self._list)
        router.add_delete(one, self._delete)
        router.add_post(f"{one}/publish", self._publish)
        router.add_delete(f"{one}/publish", self._publish)
        router.add_put(f"{one}/ttl", self._ttl)
        router.add_get(f"{one}/external_weights_urls", self._urls)
        router.add_get(f"{one}/files/{{path:.+}}", self._file, name=FILE)
        router.add_post(f"{prefix}/weights_info", self._info)

    async def _list_all(self, request: web.Request) -> web.Response:
        found = self.checkpoints.all()
        offset, limit = _page(request)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return web.json_response({"checkpoints": [one.body() for one in found[offset : offset + limit]], "cursor": cursor})

    async def _list(self, request: web.Request) -> web.Response:
        found = self.checkpoints.all(request.match_info["model"])
        return web.json_response({"checkpoints": [one.body() for one in found]})

    async def _runs(self, request: web.Request) -> web.Response:
        ids = dict.fromkeys([*self.models.ids(), *(one.model_id for one in self.checkpoints.all())])
        offset, limit = _page(request)
        runs = [self._described(model_id) for model_id in [*ids][offset : offset + limit]]
        return web.json_response({"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(ids)}})

    async def _run(self, request: web.Request) -> web.Response:
        return web.json_response(self._described(request.match_info["model"]))

    def _described(self, model_id: str) -> dict[str, Any]:
        """The protocol's TrainingRun. RequestError where the server knows no such model."""
        found = self.checkpoints.all(model_id)
        is_current = model_id in self.models.ids()
        if not found and not is_current:
            raise RequestError(f"training run: found {model_id!r:.120}; expected a model with a checkpoint here", status=404)
        newest = {
            kind: next((one.body() for one in found if one.kind == kind), None) for kind in ("weights", "sampler_weights")
        }
        rank = self.models.find(model_id).lora_rank if is_current else found[0].lora_rank
        return {
            "training_run_id": model_id,
            "base_model": self.models.served.name if is_current else found[0].base_model,
            "model_owner": OWNER,
            "is_lora": rank is not None,
            "lora_rank": rank,
            "last_request_time": datetime.now(UTC).isoformat() if is_current else found[0].created,
            "last_checkpoint": newest["weights"],
            "last_sampler_checkpoint": newest["sampler_weights"],
        }

    async def _delete(self, request: web.Request) -> web.Response:
        self.checkpoints.delete(self._found(request))
        return web.Response(status=204)

    async def _publish(self, request: web.Request) -> web.Response:
        self.checkpoints.change(self._found(request), public=request.method == "POST")
        return web.Response(status=204)

    async def _ttl(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "ttl")
        ttl = fields.integer("ttl_seconds", None)
        fields.done()
        self.checkpoints.change(self._found(request), expires=expiry(ttl))
        return web.Response(status=204)

    async def _info(self, request: web.Request) -> web.Response:
        fields = Fields(await self.bodies.json(request), "weights_info")
        found = self.checkpoints.find(fields.text("tinker_path"))
        fields.done()
        is_lora = found.lora_rank is not None
        return web.json_response({"base_model": found.base_model, "is_lora": is_lora, "lora_rank": found.lora_rank})

    async def _urls(self, request: web.Request) -> web.Response:
        checkpoint, until = self._found(request), int(time.time()) + URL_S
        base = str(request.url.with_query(None)).removesuffix("/external_weights_urls")
        urls = {
            path: f"{base}/files/{path}?until={until}&signature={self._signature(checkpoint, path, until)}"
            for path in files_of(checkpoint)
        }
        return web.json_response({"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        checkpoint, path = self._found(request), request.match_info["path"]
        until = request.query.get("until", "")
        signed = until.isdecimal() and len(until) < 20
        expected = self._signature(checkpoint, path, int(until)) if signed else ""
        if not signed or not hmac.compare_digest(expected, request.query.get("signature", "")) or int(until) < time.time():
            raise RequestError(
                "found an address that has expired or is not signed; expected one of external_weights_urls", status=403
            )
        if path not in {*files_of(checkpoint)}:
            raise RequestError(f"found the file {path!r:.200}; expected one of the checkpoint", status=404)
        return web.FileResponse(checkpoint.files / path)

    def _signature(self, checkpoint: Checkpoint, path: str, until: int) -> str:
        return hmac.new(self.secret, f"{checkpoint.path}/{path}?{until}".encode(), hashlib.sha256).hexdigest()

    def _found(self, request: web.Request) -> Checkpoint:
        model, kind, name = (request.match_info[part] for part in ("model", "kind", "name"))
        return self.checkpoints.find(f"tinker://{model}/{kind}/{name}")


def _page(request: web.Request) -> tuple[int, int]:
    """Offset and limit of a list. RequestError where they are no numbers of a page."""
    offset, limit = (request.query.get(name, default) for name, default in (("offset", "0"), ("limit", str(PAGE))))
    if not all(one.isdecimal() and len(one) < 10 for one in (offset, limit)) or not 1 <= int(limit) <= 10_000:
        raise RequestError(f"found offset {offset!r:.20} and limit {limit!r:.20}; expected whole numbers, the limit 1 to 10000")
    return int(offset), int(limit)
