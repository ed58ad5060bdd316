"""The environment `function`: prompts from data, and rewards from functions of the user's."""
