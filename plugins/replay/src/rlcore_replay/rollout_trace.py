"""The steps of a recorded run: what makes no schedule of them, and what each part of a sample was generated with."""

from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from rlcore_rollout.trace_records import GroupRecord, SampleRecord, StepRecord


def differing(found: StepRecord, expected: StepRecord) -> list[int]:
    """The groups of a step, by number, of which a sample's tokens are others than a file has."""
    return [
        group.number
        for group, other in zip(found.groups, expected.groups, strict=True)
        if [sample.digest for sample in group.samples] != [sample.digest for sample in other.samples]
    ]


def wrong_with(
    records: Sequence[StepRecord], groups_per_step: int, group_size: int, reuse: int = 1, round_size: int | None = None
) -> Iterator[tuple[int, str, str]]:
    """What makes no schedule of records that are each of the right form: a record's place among them, what was found, what was
    expected. Of `reuse` steps that train on a batch the first one names its groups. Groups have `group_size` samples, or some
    times `round_size` and at most so many."""
    sizes = range(round_size or group_size, group_size + 1, round_size or group_size)
    versions: set[int] = set()
    seen: set[int] = set()
    for place, record in enumerate(records):
        versions.add(record.version)
        numbers = [group.number for group in record.groups]
        if record.step != place + 1:
            yield place, f"step {record.step}", f"step {place + 1}: a line for each step, in order"
        if len(numbers) != groups_per_step and (numbers or place % reuse == 0):
            yield place, f"{len(numbers)} groups", f"{groups_per_step} (training.prompts_per_step)"
        if twice := sorted(seen & set(numbers)):
            yield place, f"group {twice[0]} again", "each group in one step"
        seen |= set(numbers)
        for group in record.groups:
            yield from ((place, *problem) for problem in _wrong_with_group(group, record, versions, sizes))


def _wrong_with_group(group: GroupRecord, record: StepRecord, versions: set[int], sizes: range) -> Iterator[tuple[str, str]]:
    name = f"group {group.number}"
    if len(group.samples) not in ([0] if group.left_out else sizes):
        most = "" if len(sizes) == 1 else f", or a multiple of it to {sizes[-1]}"
        yield f"{name} with {len(group.samples)} samples", f"{sizes[0]} (rollout.samples_per_prompt){most}"
    if group.began >= record.step or group.number >= record.next:
        yield f"{name}, which began after step {group.began}", f"one that began before step {record.step}"
    of_samples: set[int] = {version for sample in group.samples for turn in sample.turns for version, _ in turn}
    if unknown := sorted(of_samples - versions):
        yield f"{name} with tokens of version {unknown[0]}", f"versions that steps up to {record.step} began with"


@frozen(kw_only=True, eq=False)
class RolloutTrace:
    """The steps of a run, as they were."""

    steps: Sequence[StepRecord]
    """From the first on."""
    group_size: int
    """Samples of a group."""
    groups: Mapping[int, GroupRecord] = field(init=False)
    """By number."""
    _first_step: Mapping[int, int] = field(init=False)

    @groups.default
    def _all_groups(self) -> Mapping[int, GroupRecord]:
        return {group.number: group for record in self.steps for group in record.groups}

    @_first_step.default
    def _step_of_version(self) -> Mapping[int, int]:
        return {record.version: record.step - 1 for record in reversed(self.steps)}

    def sample(self, number: int) -> SampleRecord:
        """A sample by its number in the run."""
        group, member = divmod(number, self.group_size)
        return self.groups[group].samples[member]

    def span(self, number: int, turn: int, num_said: int) -> tuple[int, int] | None:
        """What of a sample's turn follows so many tokens without a stop: how many steps were trained when it was generated, and
        its number of tokens. None where nothing follows."""
        turns = self.sample(number).turns
        for version, num_tokens in turns[turn] if turn < len(turns) else ():
            if num_said < num_tokens:
                return self._first_step[version], num_tokens - num_said
            num_said -= num_tokens
        return None
