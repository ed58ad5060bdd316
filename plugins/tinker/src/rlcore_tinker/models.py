"""The models under training: one at a time. Whoever lets a server train many adapters changes this file."""

import asyncio
from collections.abc import Callable
from typing import Any

from rlcore_tinker.checkpoints import Checkpoint, Checkpoints
from rlcore_tinker.clients import SILENCE_S, Clients, ClientSession
from rlcore_tinker.errors import RequestError
from rlcore_tinker.ordered_requests import OrderedRequests
from rlcore_tinker.promises import Promises
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
        weights: Weights,
        checkpoints: Checkpoints,
        clients: Clients,
        promises: Promises,
        on_error: Callable[[BaseException], object],
    ) -> None:
        """`on_error` is called with each error that a request of a model ended with."""
        self.served = served
        self._weights, self._checkpoints, self._clients = weights, checkpoints, clients
        self._promises, self._on_error = promises, on_error
        self._current: TrainingModel | None = None
        self._changing = asyncio.Lock()

    def find(self, model_id: str) -> TrainingModel:
        """Return the model of an id. RequestError where it is not the one under training."""
        model = self._current
        if model is None or model.model_id != model_id:
            raise RequestError(
                f"model_id: found {model_id!r:.120}, which is not under training here; expected the model of create_model. It "
                "is released when its client ends, or is not heard of",
                status=404,
            )
        return model

    def ids(self) -> list[str]:
        """Return the ids of the models under training."""
        return [] if self._current is None else [self._current.model_id]

    async def create(
        self,
        session: ClientSession,
        number: int,
        metadata: dict[str, Any],
        start: Checkpoint | None = None,
        *,
        optimizer: bool = False,
    ) -> TrainingModel:
        """Begin to train a model: the recipe's, or a checkpoint. RequestError while another one is in use."""
        model_id = f"{session.session_id}:train:{number}"
        async with self._changing:
            await self._release_current()
            files, name = (None, BASE) if start is None else (start.files, start.weights)
            await self._weights.begin(files, name, optimizer=optimizer)
            self._current = TrainingModel(
                model_id=model_id,
                session_id=session.session_id,
                served=self.served,
                weights=self._weights,
                checkpoints=self._checkpoints,
                requests=OrderedRequests(model_id, self._promises, self._on_error),
                user_metadata=metadata,
            )
            session.models.append(model_id)
            return self._current

    async def release(self, session_id: str, model_id: str | None = None) -> None:
        """Release the model of a session, and with it its gradients. Another's stays."""
        model = self._current
        if model is not None and model.session_id == session_id and model_id in (None, model.model_id):
            self._current = None
            await model.requests.close("the model was released before this request")

    async def _release_current(self) -> None:
        """Release the model of a client that is gone. RequestError while its client is there."""
        while (model := self._current) is not None:
            client = self._clients.get(model.session_id)
            if client.is_gone:
                await self.release(model.session_id)
            elif client.silent_s < QUIET_S:
                raise RequestError(
                    f"this server trains one model at a time: {model.model_id} is in use, and its client was heard of "
                    f"{client.silent_s:.0f} s ago. Expected no other model: end that client with ServiceClient.close, or "
                    f"wait until it has been silent for {SILENCE_S:.0f} s",
                    status=409,
                )
            else:
                await asyncio.sleep(LOOK_S)
