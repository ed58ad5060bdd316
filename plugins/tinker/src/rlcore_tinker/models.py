"""The models under training: adapters of one base model, or a single one whose weights are all trained."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlcore_tinker.adapter_pool import AdapterPool, AdapterWeights
from rlcore_tinker.checkpoints import Checkpoint, Checkpoints
from rlcore_tinker.clients import SILENCE_S, Clients, ClientSession
from rlcore_tinker.errors import RequestError
from rlcore_tinker.ordered_requests import OrderedRequests
from rlcore_tinker.promises import Promises
from rlcore_tinker.tasks import uninterrupted
from rlcore_tinker.training_model import ServedModel, TrainingModel
from rlcore_tinker.weights import BASE, Weights

QUIET_S = 12.0
"""Seconds after which a client that has not sent its heartbeat may be gone."""
LOOK_S = 0.5


class Models:
    """The model under training, and the way from one to the next."""

    def __init__(
        self,
        served: ServedModel,
        weights: Weights | AdapterPool,
        checkpoints: Checkpoints,
        clients: Clients,
        promises: Promises,
        on_error: Callable[[BaseException], object],
    ) -> None:
        """`on_error` is called with each error that a request of a model ended with. With an AdapterPool several models are
        trained by turns."""
        self.served = served
        self._weights, self._checkpoints, self._clients = weights, checkpoints, clients
        self._promises, self._on_error = promises, on_error
        self._models: dict[str, TrainingModel] = {}
        self._changing = asyncio.Lock()

    def find(self, model_id: str) -> TrainingModel:
        """Return the model of an id. RequestError where it is not under training."""
        if model_id not in self._models:
            raise RequestError(
                f"model_id: found {model_id!r:.120}, which is not under training here; expected the model of create_model. It "
                "is released when its client ends, or is not heard of",
                status=404,
            )
        return self._models[model_id]

    def ids(self) -> list[str]:
        """Return the ids of the models under training."""
        return [*self._models]

    async def create(
        self,
        session: ClientSession,
        number: int,
        metadata: dict[str, Any],
        start: Checkpoint | None = None,
        *,
        optimizer: bool = False,
        seed: int | None = None,
        rank: int | None = None,
    ) -> TrainingModel:
        """Begin to train a model: the recipe's, or a checkpoint.

        `seed` decides the first values of its adapters; None is the recipe's run.seed. `rank` is theirs; None is that of the
        checkpoint, or the recipe's. RequestError while another model is in use, where the server trains one at a time."""
        model_id = f"{session.session_id}:train:{number}"
        async with self._changing:
            await self._release_gone()
            if model_id in self._models:
                raise RequestError(f"model_seq_id: found {number}, of a model that is under training; expected a new number")
            rank = rank or (self.served.lora_rank if start is None else start.lora_rank)
            if isinstance(self._weights, AdapterPool):
                seed = self.served.seed if seed is None else seed
                weights: Weights | AdapterWeights = self._weights.open(model_id, seed, rank)
            else:
                await self._wait_for_release()
                weights, rank = self._weights, self.served.lora_rank
            files, name = (None, BASE) if start is None else (start.files, start.weights)
            try:
                await weights.begin(files, name, optimizer=optimizer)
            except BaseException:
                if isinstance(self._weights, AdapterPool):
                    await self._weights.forget(model_id)
                raise
            self._models[model_id] = TrainingModel(
                model_id=model_id,
                session_id=session.session_id,
                served=self.served,
                weights=weights,
                checkpoints=self._checkpoints,
                requests=OrderedRequests(model_id, self._promises, self._on_error),
                lora_rank=rank,
                user_metadata=metadata,
            )
            session.models.append(model_id)
            return self._models[model_id]

    async def release(self, session_id: str, model_id: str | None = None) -> None:
        """Release the models of a session, or one of them, and with it its gradients. Others stay. A client that goes away
        meanwhile does not interrupt it."""
        found = [one for one in self._models.values() if one.session_id == session_id and model_id in (None, one.model_id)]
        for one in found:
            del self._models[one.model_id]
        await uninterrupted(self._close(found))

    async def _close(self, models: Sequence[TrainingModel]) -> None:
        """End the requests of models that nobody finds any more, and drop their adapters."""
        for model in models:
            await model.requests.close("the model was released before this request")
            if isinstance(self._weights, AdapterPool):
                await self._weights.forget(model.model_id)

    async def _release_gone(self) -> None:
        """Release the models of clients that are gone."""
        for session_id in {model.session_id for model in self._models.values()}:
            if self._clients.get(session_id).is_gone:
                await self.release(session_id)

    async def _wait_for_release(self) -> None:
        """Wait until no model is under training. RequestError while its client is there."""
        while self._models:
            (model,) = self._models.values()
            client = self._clients.get(model.session_id)
            if client.is_gone:
                await self.release(model.session_id)
            elif client.silent_s < QUIET_S:
                raise RequestError(
                    f"this server trains one model at a time, since its recipe has no [lora]: {model.model_id} is in use, and "
                    f"its client was heard of {client.silent_s:.0f} s ago. Expected no other model: end that client with "
                    f"ServiceClient.close, or wait until it has been silent for {SILENCE_S:.0f} s",
                    status=409,
                )
            else:
                await asyncio.sleep(LOOK_S)
