"""The result of a bisection, and what is known before its search."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from attrs import frozen

from rlcore.reading import read_json
from rlcore.spi import TokenBatch
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.header import HEADER
from rlcore_bundles.rows import Row, place_of
from rlcore_bundles.storage import MODEL

Kind: TypeAlias = Literal["setting", "package", "file", "not in the recipe", "inputs", "none"]
"""The place of the component: a key of the recipe; another version of a package; a file that has changed; in nothing that the
recipe names; in what the step begins with; or nowhere."""


WEIGHTS = "weights"
PARTED = "The steps begin with other weights: the runs had parted before. Bisect an earlier step."


@frozen(kw_only=True)
class Bisection:
    """The component that brings the difference of two steps."""

    components: Sequence[str]
    """One name, or several where no single one brings it; none where nothing differs."""
    kind: Kind
    quantity: str = ""
    """The first quantity that differs."""
    difference: float = 0.0
    bound: float = 0.0
    """The rounding of that quantity."""
    where: str = ""
    """The place of the difference, with both values."""
    is_rounding: bool = False
    """True where the difference is within rounding."""
    is_complete: bool = True
    """False where no replay was left to say which of the components it is."""
    lines: Sequence[str] = ()
    """The change to make: a key with its values, a package with its versions, or a file."""
    others: Sequence[str] = ()
    """Everything that differs between the two: keys of the recipes, and versions."""
    replays: Sequence[str] = ()
    """A line for each replay."""
    remark: str = ""


@frozen(kw_only=True, eq=False)
class Evidence:
    """The facts about two bundles before a search."""

    changes: Sequence[str]
    """Keys and versions that differ."""
    differing_files: dict[str, str]
    """The keys of files that differ, with the component of each."""
    of_generator: Sequence[str]
    """Keys of the generator, of refits and of asynchrony that differ: no replay swaps them."""
    done: Sequence[str]
    """A line for each replay; it grows."""

    def found(
        self,
        components: Sequence[str],
        kind: Kind,
        first: Row,
        lines: Sequence[str],
        *,
        exact: bool = False,
        is_complete: bool = True,
        remark: str = "",
    ) -> Bisection:
        """The result for components that bring a quantity."""
        return Bisection(
            components=list(components),
            kind=kind,
            quantity=first.quantity,
            difference=first.difference,
            bound=first.bound,
            where=first.where,
            is_rounding=exact,
            is_complete=is_complete,
            lines=list(lines),
            others=list(self.changes),
            replays=list(self.done),
            remark=remark,
        )


def from_inputs(good: Bundle, bad: Bundle, evidence: Evidence) -> Bisection:
    """The result where each step is what its own inputs and either one's settings make of it."""
    name, where = _first_input(good, bad)
    found = Bisection(components=[], kind="none", others=list(evidence.changes), replays=list(evidence.done))
    if not name:
        return found
    row = Row(quantity=name, verdict="differs", where=where)
    remark = PARTED if name == WEIGHTS else "Both steps are computed as their recipes say: they begin with other inputs."
    lines = evidence.of_generator if name == "sampled tokens" else ()
    return evidence.found([name], "inputs", row, lines, remark=remark)


def _first_input(good: Bundle, bad: Bundle) -> tuple[str, str]:
    """The first input that differs, and the place; "" where none does."""
    first, second = good.sampled, bad.sampled
    if (weights := [_weights(one) for one in (good, bad)])[0] != weights[1] and all(weights):
        return WEIGHTS, "the files of the two bundles"
    if len(first.rows) != len(second.rows):
        return "data", f"{len(second.rows)} rows; in the good one {len(first.rows)}"
    for number, (row, other) in enumerate(zip(first.rows, second.rows, strict=True)):
        if dict(row) != dict(other):
            return "data", f"group {number}: row {dict(other)!r:.100}; in the good one {dict(row)!r:.100}"
    if list(first.reset_seeds) != list(second.reset_seeds):
        return "seeds of episodes", "they follow from run.seed and the step"
    one, two = first.batch, second.batch
    shared = min(one.num_tokens, two.num_tokens)
    differing = (one.tokens[:shared] != two.tokens[:shared]).nonzero()[0]
    if len(differing) or one.num_tokens != two.num_tokens:
        token = int(differing[0]) if len(differing) else shared
        return "sampled tokens", "sample {}, token {}".format(*place_of(one.offsets, token))
    return ("", "") if good.own_step is None or bad.own_step is None else first_column(good.trained, bad.trained)


def first_column(one: TokenBatch, two: TokenBatch) -> tuple[str, str]:
    """The first column of an own loop's data that differs on equal tokens, and the place; "" where none does."""
    first, second = ({"loss_mask": batch.loss_mask, **batch.token_columns, **batch.sequence_columns} for batch in (one, two))
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second or first[name].shape != second[name].shape:
            return f"column {name}", "one bundle alone has it in this shape"
        differing = np.argwhere(first[name] != second[name])
        if len(differing):
            index = int(differing[0][0])
            is_token = name not in one.sequence_columns
            return f"column {name}", "sample {}, token {}".format(
                *place_of(one.offsets, index)
            ) if is_token else f"sample {index}"
    return "", ""


def _weights(bundle: Bundle) -> str:
    """The digests of the files of a bundle's weights; "" where it has none."""
    if bundle.directory is None or bundle.weights == "none":
        return ""
    files = read_json(bundle.directory / HEADER)["files"]
    own = sorted(name for name in files if name.startswith(f"{MODEL}/") and name.endswith(".safetensors"))
    return " ".join(files[name]["sha256"] for name in own)
