"""The text of each token of an answer, so that each can be coloured by itself."""

from collections.abc import Sequence

from attrs import define, field

from rlcore.config.model import ModelConfig
from rlcore.run.data.text import tokenizers
from rlcore.run.storage.saved_run import SavedRun
from rlcore.schema.problem import ProblemsError
from rlcore.spi import PluginError, Tokenizer

BROKEN = "\ufffd"
"""The mark of bytes that are no character: a token may hold a part of one."""
MAX_TOKENS_OF_A_CHARACTER = 6


@define(eq=False)
class TokenPieces:
    """Cuts texts where their tokens meet. What a pair of tokens reads is remembered."""

    tokenizer: Tokenizer
    _known: dict[tuple[int, ...], str] = field(factory=dict, init=False)

    def pieces(self, before: int | None, tokens: Sequence[int]) -> list[str]:
        """[T]: the text of each token behind the token `before`. Of tokens that make one character together the last has it,
        and the others are empty."""
        found: list[str] = []
        held: list[int] = []
        for token in tokens:
            held.append(token)
            text = self._behind(before, held)
            if text.endswith(BROKEN) and len(held) < MAX_TOKENS_OF_A_CHARACTER:
                found.append("")
                continue
            found.append(text)
            before, held = token, []
        if held:
            found[-1] = self._behind(before, held)
        return found

    def _behind(self, before: int | None, tokens: Sequence[int]) -> str:
        """The text of tokens behind another: SentencePiece's tokenizers put no space in front of a first one."""
        lead = () if before is None else (before,)
        key = (*lead, -1, *tokens)
        if key not in self._known:
            alone = self.tokenizer.show(list(lead)) if lead else ""
            whole = self.tokenizer.show([*lead, *tokens])
            fits = whole.startswith(alone)
            self._known[key] = whole[len(alone) :] if fits else self.tokenizer.show(list(tokens))
        return self._known[key]


def pieces_of(run: SavedRun) -> tuple[TokenPieces | None, str]:
    """The tokenizer of a run's model; None and the reason where there is none. No code of a model's runs."""
    reasons = []
    candidates: list[tuple[str, str | None]] = [] if run.model is None else [(str(run.model), None)]
    match run.recipe.get("model"):
        case {"path": str(named), "revision": str(named_revision)}:
            candidates.append((named, named_revision))
        case {"path": str(named)}:
            candidates.append((named, None))
    for path, revision in candidates:
        try:
            return TokenPieces(tokenizers().load_tokenizer(ModelConfig(path=path, revision=revision))), ""
        except ProblemsError as error:
            reasons.append("; ".join(f"{problem.path}: found {problem.found}" for problem in error.problems))
        except PluginError as error:  # no tokenizers are installed
            return None, str(error)
    return None, reasons[-1] if reasons else "the recipe names no model"
