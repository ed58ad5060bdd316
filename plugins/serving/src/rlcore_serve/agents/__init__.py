"""The environment `agent`: episodes are run by a function or a program that talks to the policy through OpenAI's API."""
