"""The environments `function` and `judge`: prompts from data, rewards from functions of the user's or from a model."""
