"""The recipe section `[environment.textarena]`."""

from attrs import frozen

from rlcore.schema.constraints import Positive

POLICY = "policy"
"""The opponent that is the policy itself."""


@frozen(kw_only=True)
class TextArenaConfig:
    """`[environment.textarena]`: two-player games, in each of which one player is trained."""

    games: tuple[str, ...] = ("TicTacToe-v0",)
    """Names of TextArena's games for two players. Rows take them in turn."""
    players: tuple[int, ...] = (0, 1)
    """The players that are trained, 0 or 1 or both. Rows take them in turn, each game once as each of them; the samples of
    a group are one player's."""
    opponent: str = POLICY
    """The other player in training. "policy": self-play with the present policy, whose turns there are not trained on.
    "random": a random one of the moves that the game lists. Or a function of your own as "package.module:name"."""
    evaluation_opponent: str = "random"
    """Who plays the other player in evaluations, as `opponent`. Against itself the policy's share of wins says nothing of its
    strength."""
    max_turns: Positive = 100
    """Turns of both players after which a game without an end is drawn."""
    num_train: Positive = 5000
    """Rows to train on."""
    num_evaluation: Positive = 100
    """Rows held out."""
    game_seed: int = 0
    """The seed of the games. It is not run.seed, so that runs with different seeds hold out the same games."""
    max_concurrent: Positive = 64
    """Most games at once."""
