"""Models behind endpoints, such as a reference or a teacher: the log-probabilities of tokens that they get as a prompt."""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from rlcore import spi
from rlcore.schema.suggestions import listed
from rlcore.secrets import keep_secret, masked
from rlcore.spi.arrays import Float32Array, Int32Array
from rlcore_torchkit.rl.endpoint_config import EndpointConfig

Decode: TypeAlias = Callable[[int], str]
"""Returns the text of one token, by the policy's tokenizer."""

AGAIN = (408, 409, 429)
"""Statuses besides 5xx that the same request may not meet again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
MAX_REPLY_BYTES = 256 * 2**20
SHOWN = 300


class EndpointModel:
    """One model. The first reply about a token proves that both tokenizers give it the same text."""

    def __init__(self, section: str, config: EndpointConfig, decode: Decode) -> None:
        """`section` is that of the options in a recipe."""
        self._section = section
        self._config, self._decode = config, decode
        self._model = ""
        self._same_text: set[int] = set()
        """Tokens whose text the endpoint has told, and which is the policy's."""
        self._lock = threading.Lock()

    def logprobs(self, batch: spi.TokenBatch) -> Float32Array:
        """float32 [T]: of every token of a batch, 0.0 at first tokens. ModelError where the endpoint is no such model, and
        PluginError where it cannot be reached."""
        if not self._model:
            self._model = self._model_name()
        with ThreadPoolExecutor(self._config.max_concurrent, thread_name_prefix="endpoint") as pool:
            return np.concatenate([*pool.map(self._of_sequence, batch.sequences())])

    def _of_sequence(self, tokens: Int32Array) -> Float32Array:
        ids = tokens.tolist()
        if len(ids) == 1:
            return np.zeros(1, np.float32)
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = self._asked("/completions", body)
        try:
            told = reply["choices"][0]["prompt_logprobs"]
            found = [] if told is None else [dict(one or {}) for one in told]
        except (KeyError, IndexError, TypeError, ValueError):
            found = []
        if not found:
            raise self._refused(
                "a completion without prompt_logprobs",
                "a server that returns them, such as `rlcore serve`",
            )
        if len(found) != len(ids):
            raise self._refused(f"log-probabilities of {len(found)} tokens for {len(ids)}", "one for each token")
        values = np.zeros(len(ids), np.float32)
        for place, token in enumerate(ids[1:], start=1):
            one = found[place].get(str(token))
            if not isinstance(one, dict) or not isinstance(one.get("logprob"), int | float):
                named = listed([str(key)[:20] for key in found[place]], 3) or "none"
                raise self._refused(f"log-probabilities of the token ids {named} at token {place}", f"that of {token}")
            self._require_same_text(token, one.get("decoded_token"))
            values[place] = one["logprob"]
        return values

    def _require_same_text(self, token: int, told: object) -> None:
        if token in self._same_text:
            return
        own = self._decode(token)
        if not isinstance(told, str):
            raise self._refused(f"no decoded_token for the token {token}", "its text, which tells tokenizers apart")
        if _letters(told) != _letters(own):
            raise self._refused(
                f"the text {told!r:.40} for the token {token}, which by the tokenizer of model.path is {own!r:.40}",
                "a model with the policy's tokenizer",
            )
        with self._lock:
            self._same_text.add(token)

    def _model_name(self) -> str:
        reply = self._asked("/models", None)
        try:
            names = [str(card["id"]) for card in reply["data"]]
        except (KeyError, TypeError):
            raise self._refused(f"{reply!s:.{SHOWN}} at /models", "a list of models; the API is usually at …/v1") from None
        wanted = self._config.model or (names[0] if len(names) == 1 else None)
        if wanted not in names:
            found = f"the models {listed([f'{name:.60}' for name in names], 8) or 'none'}"
            raise self._refused(found, "one alone" if wanted is None else f"{wanted!r}, which .model names")
        return wanted

    def _asked(self, path: str, body: dict[str, Any] | None) -> Any:
        """Return the JSON of a reply."""
        config, pause = self._config, FIRST_PAUSE_S
        headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            headers["Authorization"] = f"Bearer {keep_secret(os.environ.get(config.api_key_env, ''))}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(config.base_url.rstrip("/") + path, data, headers)
        for attempt in range(config.max_attempts):
            if attempt:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                with urllib.request.urlopen(request, timeout=config.timeout_s) as response:
                    return json.loads(response.read(MAX_REPLY_BYTES))
            except urllib.error.HTTPError as error:
                text = masked(error.read(2**16).decode(errors="replace"))[:SHOWN]
                lost = f"status {error.code}: {text}"
                if error.code not in AGAIN and error.code < 500:
                    raise self._refused(lost, "log-probabilities of the run's tokens") from None
            except (OSError, ValueError) as error:
                lost = masked(f"{type(error).__name__}: {error}")[:SHOWN]
        raise spi.PluginError(
            f"{self._section}: {config.base_url} gave no answer in {config.max_attempts} attempts ({lost}). "
            "Start the server, or raise max_attempts"
        )

    def _refused(self, found: str, expected: str) -> spi.ModelError:
        problem = spi.Problem(path=f"{self._section}.base_url", found=f"{self._config.base_url}: {found}", expected=expected)
        return spi.ModelError([problem])


class EndpointReference:
    """The reference policy of an algorithm, behind an endpoint in place of the trainer."""

    def __init__(self, section: str, config: EndpointConfig, context: spi.AlgorithmContext) -> None:
        """ConfigError where the run samples otherwise than at the temperature that endpoints score at."""
        require_temperature(context)
        self._section, self._config, self._context = section, config, context
        self._endpoint: EndpointModel | None = None

    def scored(self, batch: spi.TokenBatch) -> spi.TokenBatch:
        """Return the batch with the column `reference_logprobs`, 0.0 outside the loss mask. ModelError, PluginError as
        `EndpointModel.logprobs` raises them."""
        column = np.zeros(batch.num_tokens, np.float32)
        if batch.tokens.any():  # else they are the made-up samples of a check, which asks no endpoint
            require_scorable(batch, self._section, "Leave it out, so that the trainer holds the reference")
            if self._endpoint is None:
                self._endpoint = EndpointModel(self._section, self._config, decoder_of(self._context.model))
            column = np.where(batch.loss_mask, self._endpoint.logprobs(batch), column)
        return batch.with_token_column(spi.REFERENCE_LOGPROBS, column)


def require_temperature(context: spi.AlgorithmContext) -> None:
    """ConfigError where the run samples otherwise than at the temperature that endpoints score at."""
    if context.temperature != 1.0:
        found = f"{context.temperature}, with models behind endpoints, which score at 1.0"
        raise spi.ConfigError([spi.Problem(path="rollout.temperature", found=found, expected="1.0")])


def require_scorable(batch: spi.TokenBatch, path: str, remedy: str) -> None:
    """PluginError where a batch holds what an endpoint does not score; `path` is the key that names endpoints."""
    if batch.sampling_mask is not None or batch.images is not None:
        what = "images" if batch.sampling_mask is None else "tokens that top_k, top_p or a schema chose among fewer than all"
        raise spi.PluginError(
            f"{path}: found {what}; expected plain text, sampled from the whole distribution: "
            f"an endpoint scores nothing else. {remedy}"
        )


def decoder_of(model: spi.ModelSpec | None) -> Decode:
    """Return what the tokenizer of model.path makes of a token. ContractError without a model."""
    if model is None:
        raise spi.ContractError("found no model in the algorithm's context; expected it, for its tokenizer")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))


def _letters(text: str) -> str:
    """The text without what servers write otherwise: spaces, and marks of half a character."""
    return "".join(
        letter for letter in text if not letter.isspace() and letter not in "\N{REPLACEMENT CHARACTER}\u2581\u0120\u010a"
    )
