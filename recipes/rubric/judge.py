"""A judge behind OpenAI's API that scores by rules: python recipes/rubric/judge.py --port 8002

It takes the place of a model: the recipe's base_url may name any other server.
"""

import argparse
import json
import re
import time
from typing import Any

from aiohttp import web

ASKED = re.compile(r"Sum: (\d+)\+(\d+)=\nAnswer: (.*)")


def scores(prompt: str) -> dict[str, int]:
    """Scores from 0 to 10 of the recipe's criteria."""
    found = ASKED.search(prompt)
    if found is None:
        return {"right": 0, "length": 0, "last_digit": 0}
    expected, answer = str(int(found[1]) + int(found[2])), found[3].strip()
    return {
        "right": 10 * (answer == expected),
        "length": 10 * (len(answer) == len(expected)),
        "last_digit": 10 * (answer[-1:] == expected[-1]),
    }


async def complete(request: web.Request) -> web.Response:
    """A chat completion whose content is a JSON object of scores."""
    body: dict[str, Any] = await request.json()
    content = json.dumps(scores(body["messages"][-1]["content"]))
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    completion = {"id": "0", "object": "chat.completion", "created": int(time.time()), "model": body["model"]}
    return web.json_response({**completion, "choices": [choice]})


def application() -> web.Application:
    """The server."""
    made = web.Application()
    made.router.add_post("/v1/chat/completions", complete)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8002)
    web.run_app(application(), host="127.0.0.1", port=parser.parse_args().port)
