"""The server side of the tinker API."""
