"""Updates vLLM servers outside the run with each refit, over HTTP: pause, load, resume.

The run's own refit comes first. While its buckets pass, each is written to a file that the servers then read. The routes and
the worker that they reach are vLLM's own server's and this plugin's, so this is a part of it and not of the core.
"""

import logging
import ssl
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from attrs import evolve, frozen

from rlcore.spi import ChannelSender, RefitError, WeightBucket, WeightExport
from rlcore_vllm.channels import make_sender
from rlcore_vllm.channels.manifest import Manifest
from rlcore_vllm.setup.config import VllmConfig

CHANNEL = "directory"
logger = logging.getLogger(__name__)


class _RefusedError(RefitError):
    """A worker looked at what comes and did not begin."""


class Followers:
    """The followers of a generator. `tee` what a refit sends, and `push` once the generator itself holds it."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._sender: ChannelSender | None = None
        self._manifest: Manifest | None = None
        self._buckets: list[dict[str, Any]] = []

    def tee(self, export: WeightExport) -> WeightExport:
        """An export that writes its buckets down as they pass. Where that fails, RefitError if followers are required."""
        if not self._config.followers:
            return export
        self._manifest, self._buckets = Manifest.of(export), []
        return evolve(export, buckets=self._written(export))

    def push(self) -> None:
        """Bring every follower to the weights. A failure is a warning, or part of a RefitError where followers are required."""
        if self._manifest is None:
            return
        try:
            addresses = self._config.followers
            with ThreadPoolExecutor(len(addresses)) as pool:
                failures = [failure for failure in pool.map(self._update, addresses) if failure is not None]
        finally:
            self._forget()
        self._report(failures)

    def close(self) -> None:
        """Remove what is left of a refit that did not come to its push."""
        self._forget()

    def _written(self, export: WeightExport) -> Iterator[WeightBucket]:
        for index, bucket in enumerate(export.buckets):
            if self._manifest is not None:
                try:
                    self._write(index, bucket, self._manifest)
                except RefitError as error:
                    self._forget()
                    self._report([f"no follower is updated: {error}"])
            yield bucket

    def _write(self, index: int, bucket: WeightBucket, manifest: Manifest) -> None:
        if self._sender is None:
            self._sender = make_sender(CHANNEL, self._config, torch.device("cpu"))
        if index == 0:
            self._sender.begin(manifest.specs, persistent=manifest.persistent)
        where = self._sender.put(index, [named.tensor.detach() for named in bucket.tensors])
        names, digests = [named.name for named in bucket.tensors], [named.digest for named in bucket.tensors]
        self._buckets.append({"names": names, "digests": digests, "where": where})

    def _forget(self) -> None:
        self._manifest, self._buckets = None, []
        if self._sender is not None:
            self._sender.end()

    def _update(self, address: str) -> str | None:
        """Bring one follower to the weights; returns why that failed, or None."""
        assert self._manifest is not None
        # A follower's URL is its own address, so no proxy of the environment applies. The machine's certificates do.
        timeout, certificates = self._config.refit_timeout_s, ssl.create_default_context()
        client = httpx.Client(base_url=address, timeout=timeout, trust_env=False, verify=certificates)
        server = _Server(client=client, timeout_s=timeout)
        try:
            server.workers("connect", {"channel": CHANNEL, "options": {}})
            server.post("/pause", mode="keep", clear_cache="true")
            self._transfer(server, self._manifest)
            server.drop_caches()
            server.label(self._manifest.weight_version)
            server.post("/resume")
        except RefitError as error:
            return f"follower {address} does not have version {self._manifest.weight_version}: {error}"
        finally:
            client.close()
        return None

    def _transfer(self, server: "_Server", manifest: Manifest) -> None:
        """Send everything and compare the acknowledgements. A server that got a part stays paused: it would generate by no
        version."""
        try:
            server.workers("begin", manifest.to_wire())
            for bucket in self._buckets:
                server.workers("bucket", bucket)
            acknowledged = server.workers("finish", {})
        except _RefusedError:
            server.workers("abandon", {})
            server.post("/resume")
            raise
        except RefitError as error:
            raise RefitError(f"{error}. It stays paused until a refit succeeds") from error
        digests = {
            name: digest for bucket in self._buckets for name, digest in zip(bucket["names"], bucket["digests"], strict=True)
        }
        for rank, answer in enumerate(acknowledged):
            if answer["weight_version"] != manifest.weight_version or answer["digests"] != digests:
                wrong = sorted(name for name in digests if answer["digests"].get(name) != digests[name])
                named = ", ".join(wrong[:5]) or f"version {answer['weight_version']}"
                raise RefitError(
                    f"its rank {rank} acknowledges other weights ({named}). It stays paused until a refit succeeds"
                )

    def _report(self, failures: list[str]) -> None:
        if failures and self._config.followers_required:
            raise RefitError("; ".join(failures))
        for failure in failures:
            logger.warning("%s", failure)


@frozen(kw_only=True)
class _Server:
    """A server of vLLM, by its routes."""

    client: httpx.Client
    timeout_s: float

    def workers(self, step: str, content: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A step of the refit in every rank."""
        call = {"method": "rlcore_refit", "args": [step, content], "timeout": self.timeout_s}
        answers: list[dict[str, Any]] = self.post("/collective_rpc", call)["results"]
        for answer in answers:
            if "refused" in answer:
                raise (_RefusedError if step == "begin" else RefitError)(answer["refused"])
            if "failed" in answer:
                raise RefitError(answer["failed"])
        return answers

    def drop_caches(self) -> None:
        """Nothing that was computed under the old weights is used again."""
        answer = self.post("/reset_prefix_cache", reset_running_requests="true", reset_external="true")
        if answer.get("success") is False:
            raise RefitError("it did not drop its caches. It stays paused until a refit succeeds")

    def label(self, weight_version: int) -> None:
        """Set the version that GET /weight_info shows, where this version of vLLM has it."""
        try:
            self.post("/update_weight_version", {"new_version": str(weight_version)})
        except _NotFoundError:
            return

    def post(self, route: str, content: Mapping[str, Any] | None = None, **query: str) -> Any:
        """The JSON that the route answers with."""
        try:
            answer = self.client.post(route, params=query or None, json=content or {})
        except httpx.HTTPError as error:
            raise RefitError(f"{route}: {error}") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise _NotFoundError(f"{route}: not found there; expected a server of vLLM, started as docs/serving.md says")
        if not answer.is_success:
            raise RefitError(f"{route}: HTTP {answer.status_code}: {answer.text[:500]}")
        try:
            return answer.json() if answer.content else {}
        except ValueError as error:
            raise RefitError(f"{route}: answered with something else than JSON: {answer.text[:80]!r}") from error


class _NotFoundError(RefitError):
    """The server has no such route."""
