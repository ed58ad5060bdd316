"""Generator for rlcore: any endpoint with OpenAI's API that returns token ids and log-probabilities"""
