"""What a row's prompt is read as."""

import pytest

from rlcore.spi import DataError, Observation

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("prompt", "prompt_format", "system_prompt", "messages", "text"),
    [
        ("Hello", "chat", None, MESSAGES, None),
        ("Hello", "chat", "Be brief.", [{"role": "system", "content": "Be brief."}, *MESSAGES], None),
        ("Hello", "text", None, None, "Hello"),
        (MESSAGES, "text", "Be brief.", MESSAGES, None),
    ],
)
def test_a_prompt_is_messages_or_text(prompt, prompt_format, system_prompt, messages, text):
    observation = Observation.of_prompt(prompt, prompt_format=prompt_format, system_prompt=system_prompt)
    assert (observation.messages, observation.text, observation.tokens) == (messages, text, None)


@pytest.mark.parametrize(("prompt", "prompt_format"), [("Hello", "chat"), (MESSAGES, "text")])
def test_tools_stand_beside_messages_alone(prompt, prompt_format):
    assert Observation.of_prompt(prompt, prompt_format=prompt_format, tools=({},)).tools == ({},)
    with pytest.raises(DataError, match="tools"):
        Observation.of_prompt("Hello", prompt_format="text", tools=({},))
