"""Answers in a JSON Schema from real generators, by OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai_servers import rlcore_serve, serving
from pydantic import BaseModel, Field

from rlcore_torchkit.testing.models import make_model


class Step(BaseModel, extra="forbid"):
    sum: int = Field(ge=0, le=99)
    word: str = Field(max_length=4)


class Answer(BaseModel, extra="forbid"):
    steps: list[Step] = Field(max_length=2)
    verdict: Literal["yes", "no"]
    sure: bool | None


SCHEMA = Answer.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ASKED: Any = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.wide)])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of `rlcore serve` with random weights."""
    folder = tmp_path_factory.mktemp(request.param)
    options = []
    if request.param == "vllm":
        pytest.importorskip("vllm")
        options = ["generator.vllm.cpu_kv_cache_gib=0.1"]
    model = make_model(folder / "model", "qwen3", hidden_size=64, num_heads=2, num_kv_heads=1, max_length=512)
    command = [*rlcore_serve(str(model), generator=request.param, limit=512), *options]
    with serving(command, folder / "log.txt") as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)


def test_every_answer_fulfils_its_schema(client: openai.OpenAI) -> None:
    """Also beside free answers of the same batch, greedily, and truncated."""
    for options in ({}, {"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.9}):
        found = client.chat.completions.create(
            model="policy", messages=ASKED, response_format=FORMAT, max_tokens=200, n=6, seed=3, logprobs=True, **options
        )
        assert {choice.finish_reason for choice in found.choices} == {"stop"}
        for choice in found.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    free = client.chat.completions.create(model="policy", messages=ASKED, max_tokens=8, seed=3)
    assert free.choices[0].message.content


def test_clients_parse_answers(client: openai.OpenAI) -> None:
    """Both of OpenAI's APIs hold to it, whole and as a stream."""
    chat = client.chat.completions.parse(model="policy", messages=ASKED, response_format=Answer, seed=3, max_tokens=200)
    assert isinstance(chat.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(
        model="policy", messages=ASKED, response_format=Answer, seed=3, max_tokens=200
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == chat.choices[0].message.parsed
    response = client.responses.parse(model="policy", input="1+1", text_format=Answer, max_output_tokens=200)
    assert isinstance(response.output_parsed, Answer)
    any_object: Any = {"type": "json_object"}
    found = client.chat.completions.create(model="policy", messages=ASKED, response_format=any_object, n=4, max_tokens=100)
    assert all((choice.message.content or "").startswith("{") for choice in found.choices)
    assert all(
        isinstance(json.loads(choice.message.content or ""), dict) for choice in found.choices if choice.finish_reason == "stop"
    )


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"type": "word"}, "Invalid type"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused(client: openai.OpenAI, schema: Any, found: str) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="policy", messages=ASKED, response_format=wrong)
    assert found in raised.value.message
    assert client.chat.completions.create(model="policy", messages=ASKED, max_tokens=2).choices
