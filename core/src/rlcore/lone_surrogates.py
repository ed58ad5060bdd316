"""Find lone surrogates, which a Python string may hold and UTF-8 and tokenizers cannot encode."""


def lone_surrogate(text: str) -> str | None:
    """Return a description of the first lone surrogate in a text, and its place; None without one."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{described(text[error.start])} at character {error.start}"
    return None


def described(surrogate: str) -> str:
    """Return the words for a lone surrogate in messages."""
    return f"half a character (the surrogate \\u{ord(surrogate):04x} by itself)"
