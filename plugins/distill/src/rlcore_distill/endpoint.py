"""A teacher behind vLLM's OpenAI server: the log-probabilities of tokens that it is given as a prompt."""

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
from rlcore_distill.config import TeacherConfig

Decode: TypeAlias = Callable[[int], str]
"""Returns the text of one token, by the policy's tokenizer."""

AGAIN = (408, 409, 429)
"""Statuses besides 5xx that the same request may not meet again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
MAX_REPLY_BYTES = 256 * 2**20
SHOWN = 300


class EndpointTeacher:
    """One teacher. The first reply about a token proves that both tokenizers give it the same text."""

    def __init__(self, name: str, config: TeacherConfig, decode: Decode) -> None:
        self._section = f"algorithm.distill.teachers.{name}"
        self._config, self._decode = config, decode
        self._model = ""
        self._same_text: set[int] = set()
        """Tokens whose text the endpoint has told, and which is the policy's."""
        self._lock = threading.Lock()

    def logprobs(self, batch: spi.TokenBatch) -> Float32Array:
        """float32 [T]: of every token of a batch, 0.0 at first tokens. ModelError where the endpoint is no such teacher, and
        PluginError where it cannot be reached."""
        if not self._model:
            self._model = self._model_name()
        with ThreadPoolExecutor(self._config.max_concurrent, thread_name_prefix="teacher") as pool:
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
                "a completion without prompt_logprobs", "a server that returns them, such as vLLM's (`vllm serve MODEL`)"
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
                "a teacher with the policy's tokenizer",
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


def decoder_of(model: spi.ModelSpec) -> Decode:
    """Return what the tokenizer of model.path makes of a token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))


def _letters(text: str) -> str:
    """The text without what servers write otherwise: spaces, and marks of half a character."""
    return "".join(
        letter for letter in text if not letter.isspace() and letter not in "\N{REPLACEMENT CHARACTER}\u2581\u0120\u010a"
    )
