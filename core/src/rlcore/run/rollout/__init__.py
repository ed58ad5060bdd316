"""From prompts to rewarded samples: episodes of generator and environment."""
