"""Half characters: surrogates by themselves, which a Python text may hold and which UTF-8 and tokenizers have no room for."""


def half_character(text: str) -> str | None:
    """What to say of the first surrogate by itself in a text, and where it is; None where there is none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{described(text[error.start])} at character {error.start}"
    return None


def described(surrogate: str) -> str:
    """How messages name a surrogate by itself."""
    return f"half a character (the surrogate \\u{ord(surrogate):04x} by itself)"
