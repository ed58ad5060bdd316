"""The methods of a session of rlcore that the server calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rlcore.spi import FinishReason, LossSpec, TokenBatch
from rlcore.spi.arrays import Float32Array, Int32Array


class SampledCompletion(Protocol):
    """One sample of a prompt: rlcore_session.Completion."""

    @property
    def tokens(self) -> Int32Array:
        """int32 [T]: the tokens behind the prompt."""

    @property
    def logprobs(self) -> Float32Array:
        """float32 [T]: log-probability of each token under the distribution sampled from."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why the sample ended."""


class PieceGradients(Protocol):
    """The figures of one forward_backward: rlcore_session.Gradients."""

    @property
    def loss(self) -> float:
        """The loss of the call."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss function's own figures."""

    @property
    def logprobs(self) -> Sequence[Float32Array]:
        """float32 [T] of each sequence, 0.0 at first tokens."""


class StepUpdate(Protocol):
    """The figures of one optim_step: rlcore_session.Update."""

    @property
    def grad_norm(self) -> float:
        """Global L2 norm of the gradients before clipping."""

    @property
    def learning_rate(self) -> float:
        """The rate that the update used."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The trainer's own figures."""


class AsyncSamplingSession(Protocol):
    """The coroutines of a session: rlcore_session.AsyncSession."""

    async def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        stop: Sequence[str],
        stop_token_ids: Sequence[int] | None,
        seed: int | None,
        adapter: str | None,
    ) -> Sequence[Sequence[SampledCompletion]]:
        """Return the samples of each prompt."""


class TrainingSession(Protocol):
    """An open session: rlcore_session.Session, whose methods may be called from any thread."""

    @property
    def asynchronous(self) -> AsyncSamplingSession:
        """The session's coroutines."""

    def logprobs(self, sequences: Sequence[Sequence[int]], *, model: Literal["policy", "reference"]) -> Sequence[Float32Array]:
        """Return the log-probabilities of each sequence's tokens."""

    def forward_backward(self, data: TokenBatch, loss: LossSpec) -> PieceGradients:
        """Add the gradients of the data to those of the step."""

    @property
    def computes_together(self) -> bool:
        """Return whether `forward_backward_together` shares passes, and an error of it leaves all gradients."""

    def forward_backward_together(self, pieces: Mapping[str, Mapping[str, Any]]) -> Mapping[str, PieceGradients]:
        """Add the gradients of each adapter's piece: the arguments of forward_backward by the adapter's name."""

    def drop_gradients(self) -> None:
        """Drop the gradients of the step."""

    def optim_step(
        self, *, learning_rate: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float
    ) -> StepUpdate:
        """Apply the gradients."""

    def use_adapter(self, name: str, *, seed: int | None = None, rank: int | None = None, drops: Sequence[str] = ()) -> int:
        """Change to another adapter; a seed begins it, at a rank."""

    @property
    def holds_adapters(self) -> bool:
        """Return whether the generator holds several adapters by their names."""

    @property
    def sampler_adapters(self) -> Mapping[str, int]:
        """Return the versions of the adapters that it holds, by name."""

    def sync(self, name: str | None = None) -> int:
        """Bring the trainer's weights to the generator, which holds them by this name."""

    def save(self, directory: Path) -> Any:
        """Write the trainer's state."""

    def load(self, directory: Path, optimizer: bool, name: str | None = None) -> Any:
        """Read the trainer's state, and bring its weights to the generator. Gradients are dropped."""

    def export(self, directory: Path, kind: Literal["hf", "peft"]) -> Any:
        """Write the weights as a model directory, or as an adapter of PEFT."""
