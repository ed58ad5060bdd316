"""`rlcore.open`."""

from pathlib import Path

from rlcore.api import Recipe, as_recipe, require_words
from rlcore.config.load import Origin
from rlcore.model_files import config_number
from rlcore.run.data.text import tokenizers
from rlcore.run.plan.other_models import check_vocabulary
from rlcore_session.plan import plan_of
from rlcore_session.session import Session


def open_session(recipe: Recipe, *overrides: str, reference: bool = False) -> Session:
    """Open a session of a recipe's model: its trainer, its generator and its optimizer.

    `recipe` is a TOML file, or a mapping of what one would hold; `overrides` are texts such as "optimizer.learning_rate=1e-5".
    With `reference` the session also holds the frozen reference, [reference] or the policy's beginning. Sections of a recipe
    that a session does not read are named in a warning of the logger "rlcore.session". Raises RlcoreError with all that is
    wrong before anything is allocated.
    """
    require_words(overrides)
    plan = plan_of(as_recipe(recipe), overrides, Origin(label="rlcore.open", directory=Path.cwd()), reference=reference)
    tokenizer = tokenizers().load_tokenizer(plan.recipe.model)
    check_vocabulary(plan.recipe, tokenizer)
    vocab_size = tokenizer.vocab_size or config_number(plan.recipe.model.path, "vocab_size")
    return Session(plan, tokenizer, vocab_size)
