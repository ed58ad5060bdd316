"""An agent that asks for a product as JSON, held to a schema."""

import json
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"product": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["product"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "product", "schema": SCHEMA}}


async def product(task: Any, client: Any) -> dict[str, float]:
    """Reward the right product by 1, and another by its distance; an answer that a limit cut is no JSON."""
    reply = await client.openai.chat.completions.create(
        model=client.model, messages=[{"role": "user", "content": task["prompt"]}], response_format=FORMAT
    )
    try:
        found = json.loads(reply.choices[0].message.content)["product"]
    except json.JSONDecodeError:
        return {"reward": 0.0, "json": 0.0}
    distance = abs(found - int(task["answer"]))
    return {"reward": 1.0 if distance == 0 else 0.5 / (1 + distance), "json": 1.0}
