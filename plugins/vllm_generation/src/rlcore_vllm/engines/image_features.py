"""The images of a prompt as vLLM's engine takes them."""

from collections.abc import Sequence
from typing import Any

from rlcore.spi import ContractError
from rlcore_model_files.images import decode_image
from rlcore_vllm.engines import versions


def image_features(llm: Any, request_id: str, prompt: Sequence[int], files: Sequence[bytes]) -> Sequence[Any]:
    """Compute vLLM's features of the images of a prompt, whose first placeholders stand for them. `request_id` is no other
    prompt's.

    vLLM puts placeholders into prompts itself. It is given one for each image, and has to come to the prompt that the trainer
    sees: ContractError where it does not.
    """
    token = int(llm.model_config.hf_config.image_token_id)
    images = [decode_image(file) for file in files]
    expanded, features = versions.process_images(llm, request_id, one_placeholder_each(prompt, token, len(files)), images)
    if list(expanded) != list(prompt):
        found = f"a prompt of {len(expanded)} tokens with {list(expanded).count(token)} placeholders"
        raise ContractError(f"images: vLLM makes of them {found}; expected {len(prompt)} with {list(prompt).count(token)}")
    return features


def one_placeholder_each(prompt: Sequence[int], token: int, num_images: int) -> list[int]:
    """Return the prompt with one placeholder for each of its first `num_images` rows of placeholders; later ones are the
    policy's."""
    shown: list[int] = []
    num_rows, last = 0, None
    for current in prompt:
        num_rows += current == token and last != token
        if not (current == token == last and num_rows <= num_images):
            shown.append(int(current))
        last = current
    return shown
