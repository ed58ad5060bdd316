"""Corrections of what vLLM does to classes of models before it builds one, for this process and for CPUs."""

from typing import Any

from rlcore.spi import ContractError


def keep_transformers_classes(*, eager: bool) -> None:
    """Have vLLM leave transformers' classes as they are, in a process where a trainer computes with them.

    For torch.compile, vLLM gives a class that it computes with another `__init__` and `__call__`. Both fail in a model that a
    trainer has built or builds of this class. ContractError where such a model is to be compiled here.
    """
    from vllm.model_executor.models.transformers.base import Base

    def decorate(self: Any, cls: type, *args: Any, **options: Any) -> None:
        del self, args, options
        if not eager:
            raise ContractError(
                f"generator.vllm.enforce_eager: found false, with transformers' {cls.__name__} in the trainer's process; "
                "expected true, or another refit.channel than in_process: vLLM would change the trainer's class"
            )

    Base._decorate_cls_for_torch_compile = decorate


def drop_prefix_cache_of_states() -> None:
    """On a CPU, build models whose layers have states, such as Mamba's, without a prefix cache: vLLM's for states needs prompts
    in parts, which rlcore cannot have there."""
    from vllm.model_executor.models.config import MambaModelConfig

    own: Any = MambaModelConfig.verify_and_update_config
    if hasattr(own, "rlcore_own"):
        return

    def verify(vllm_config: Any) -> None:
        vllm_config.cache_config.enable_prefix_caching = False
        own(vllm_config)

    verify.rlcore_own = own  # type: ignore[attr-defined]
    MambaModelConfig.verify_and_update_config = staticmethod(verify)
