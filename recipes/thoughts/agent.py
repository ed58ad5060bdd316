"""An agent that asks for two digits, one after another, and sends the whole chat each time, thoughts included."""

from typing import Any


async def repeat(task: Any, client: Any) -> dict[str, float]:
    """Reward answers of one digit behind a thought: a quarter for the thought's end, one for the form, half for the digit."""
    messages: list[dict[str, str]] = []
    rewards, ended = [], 0
    for digit in task["prompt"]:
        messages.append({"role": "user", "content": digit})
        reply = await client.openai.chat.completions.create(model=client.model, messages=messages)
        content = reply.choices[0].message.content or ""
        _, mark, answer = content.partition("</think>")
        ended += bool(mark)
        well_formed = bool(mark) and len(answer) == 1 and answer.isdigit()
        rewards.append(0.25 * bool(mark) + 0.25 * well_formed + 0.5 * (well_formed and answer == digit))
        messages.append({"role": "assistant", "content": content})
    return {"reward": sum(rewards) / len(rewards), "thoughts": float(ended)}
