"""vLLM's structured outputs, in an engine that starts without a tokenizer: the first sample with a schema brings it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcore.schema.suggestions import listed
from rlcore.spi import ContractError
from rlcore_torchkit.json_schema import guided_schema

BACKEND = "guidance"
"""vLLM's name for llguidance. It refuses the keywords of a schema that it does not enforce."""


def structured_outputs(schema: str) -> Any:
    """Return vLLM's parameters for samples that fulfil a JSON Schema. DataError as `guided_schema` raises it."""
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(json=guided_schema(schema))
    params._backend = BACKEND  # vLLM's input processor, which engines here do without, sets it
    return params


def start_grammars(core: Any, load_tokenizer: Callable[[], Any], stop_token_ids: Sequence[int]) -> None:
    """Give an engine core the tokenizer and the thread that its grammars need, once: `skip_tokenizer_init` leaves both out.
    ContractError where the token that ends a complete text, the tokenizer's own, is no stop token."""
    manager, tokenizer = core.structured_output_manager, load_tokenizer()
    if tokenizer.eos_token_id not in stop_token_ids:
        found = f"the stop tokens {listed(list(map(str, stop_token_ids)), 8) or 'none'}"
        raise ContractError(f"generate: found a JSON Schema and {found}; expected {tokenizer.eos_token_id} among them")
    if not hasattr(manager, "tokenizer"):
        manager.tokenizer = tokenizer
        manager.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlcore-vllm-grammar")
