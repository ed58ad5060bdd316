"""The hooks of trainers and generators, wrapped alike."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

from rlcore.spi import hookimpl


class AllHooks(ABC):
    """An observer that does the same around each hook."""

    @abstractmethod
    def during(self, hook: str) -> Generator[None, Any, Any]:
        """Wrap a call of the hook: yield once, and return what the yield gave."""

    @abstractmethod
    def before_close(self) -> None:
        """A backend is about to be closed."""

    @hookimpl(wrapper=True)
    def train_step(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap an optimizer step."""
        return (yield from self.during("train_step"))

    @hookimpl(wrapper=True)
    def forward_backward(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap the gradients of a piece of a step."""
        return (yield from self.during("forward_backward"))

    @hookimpl(wrapper=True)
    def forward_backward_together(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap the gradients of pieces of several adapters."""
        return (yield from self.during("forward_backward_together"))

    @hookimpl(wrapper=True)
    def optim_step(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap an update."""
        return (yield from self.during("optim_step"))

    @hookimpl(wrapper=True)
    def get_logprobs(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a pass for log-probabilities."""
        return (yield from self.during("get_logprobs"))

    @hookimpl(wrapper=True)
    def get_values(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a pass for values."""
        return (yield from self.during("get_values"))

    @hookimpl(wrapper=True)
    def export_weights(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap an export."""
        return (yield from self.during("export_weights"))

    @hookimpl(wrapper=True)
    def generate(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a generation."""
        return (yield from self.during("generate"))

    @hookimpl(wrapper=True)
    def stream(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a stream of samples."""
        return (yield from self.during("stream"))

    @hookimpl(wrapper=True)
    def refit(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a refit."""
        return (yield from self.during("refit"))

    @hookimpl(wrapper=True)
    def set_residency(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a move in or out of the device's memory."""
        return (yield from self.during("set_residency"))

    @hookimpl(wrapper=True)
    def save_state(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a save."""
        return (yield from self.during("save_state"))

    @hookimpl(wrapper=True)
    def load_state(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - the argument of every hook
        """Wrap a load."""
        return (yield from self.during("load_state"))

    @hookimpl(wrapper=True)
    def close(self, request: Any) -> Generator[None, Any, Any]:  # noqa: ARG002 - likewise
        """Wrap the end."""
        self.before_close()
        return (yield)
