"""Repeated keys of JSON are refused by whatever reads rows, calls, requests and model directories."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.model_files import read_object
from rlcore.run.data.jsonl_rows import parse_line
from rlcore.schema.file_limits import unique_keys
from rlcore.spi import DataError, Problem
from rlcore_model_files.directory import file_problems
from rlcore_serve.sessions.bounds import read_json
from rlcore_serve.sessions.errors import RequestError
from rlcore_text.chats.messages import read_message


def row(text: str) -> object:
    return parse_line(text.encode())


def call(text: str) -> object:
    function = {"name": "f", "arguments": text}
    return read_message({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})


def request(text: str) -> object:
    return read_json(text.encode())


def config(text: str, directory: Path) -> object:
    (directory / "config.json").write_text(text)
    return read_object(directory / "config.json")


def header(text: str, directory: Path) -> object:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    return next(file_problems(directory), text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 3}', '{"b": {"a": {}, "a": {}}}', '{"b": [{"a": 1, "\\u0061": 1}]}'])
@pytest.mark.parametrize(
    ("read", "error"), [(row, ValueError), (call, DataError), (request, RequestError), (json.loads, ValueError)]
)
def test_a_repeated_key_is_named(read: Callable[..., object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="'a' 2 times"):
        json.loads(text, object_pairs_hook=unique_keys) if read is json.loads else read(text)
    read('{"a": 1, "b": [{"a": 2}, {"a": 2}]}')


def test_a_repeated_key_of_a_model_directory_is_named(tmp_path: Path) -> None:
    found = config('{"vocab_size": 8, "vocab_size": 9}', tmp_path)
    assert isinstance(found, Problem)
    assert "the key 'vocab_size' 2 times" in str(found)
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    found = header(f'{{"w":{empty},"w":{empty}}}', tmp_path)
    assert isinstance(found, Problem)
    assert "a header that is none of safetensors" in str(found)
