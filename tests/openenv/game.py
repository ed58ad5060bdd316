"""A small game that the tests' servers play: guess a letter, which follows from the seed."""

from typing import Any

LETTERS = "abc"
NUM_GUESSES = 3


class Game:
    """Up to three guesses; a letter that is not the one is worth a quarter."""

    def __init__(self) -> None:
        self.secret, self.left = "", 0

    def reset(self, seed: int, hint: str = "") -> dict[str, Any]:
        self.secret, self.left = LETTERS[seed % len(LETTERS)], NUM_GUESSES
        return {"text": f"guess {hint}".strip(), "left": self.left}

    def step(self, message: str) -> tuple[dict[str, Any], float | None, bool]:
        """The observation, the reward (None for what is no letter of the game) and whether the game is over."""
        if message == "crash":
            raise RuntimeError("the game has crashed")
        self.left -= 1
        is_right = message == self.secret
        reward = 1.0 if is_right else 0.25 if message in LETTERS else None
        return {"text": "right" if is_right else "wrong", "left": self.left}, reward, is_right or self.left == 0
