"""The objects that entry points name: a light description of a plugin, from which the core chooses before importing anything
heavy."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from attrs import field, frozen

from rlcore.installed import disabled_by_variable, distribution_of, installed_entry_points, matching
from rlcore.schema.printable import as_plain, plain_texts
from rlcore.spi.version import SPI_VERSION
from rlcore.time_limit import loading

DescriptionT = TypeVar("DescriptionT")
Role: TypeAlias = Literal["trainer", "generator", "algorithm", "environment", "sink", "execution"]
ROLES: tuple[Role, ...] = get_args(Role)

ENTRY_POINT_GROUPS: dict[Role, str] = {role: f"rlcore.{role}s" for role in ROLES}
"""Entry-point group of each role."""
OBSERVER_GROUP = "rlcore.observers"
"""Objects with wrapper-only hooks, or classes of them, which a recipe names to use them."""
GLOBAL_OBSERVER_GROUP = "rlcore.global_observers"
"""Observers that are in use in every run, named by the recipe or not, unless disabled."""
MODEL_CHECK_GROUP = "rlcore.model_checks"
"""Functions, called as function(path) -> Iterable[Problem] with `model.path`, or that of another model of the recipe, where a
chosen plugin reads it (Provider.reads_model). A run uses the only one that is installed."""
REFERENCE_CACHE_GROUP = "rlcore.reference_caches"
"""Functions, called as function(plan, reference, directory=directory, model_digest=digest, note=note), with the RunPlan and the
core's Reference, where an algorithm compares with a reference. They return a context manager of a Reference that spares
computing anew. A run uses the only one that is installed."""
DISPLAY_GROUP = "rlcore.displays"
"""Functions, called as function(mode) with "auto", "live" or "plain" where a run or an evaluation begins. They return the
core's Progress, which is entered and left where it is a context manager. A run uses the only one that is installed."""
SESSION_SERVER_GROUP = "rlcore.session_servers"
"""Functions or classes, called as function(context) by the collector of agents' episodes, whose package says what the context
holds and what is returned. A run uses the only one that is installed."""
API_GROUP = "rlcore.apis"
"""The function `open` of this group is `rlcore.open`."""
ARCHITECTURE_GROUP = "rlcore.architectures"
"""Families of models, each under its `model_type`, which backends that are written with torchkit read."""


FUNCTION_KINDS = (
    *("importer", "planner", "chart", "session_server", "training_server", "model_check", "reference_cache", "display", "api"),
    *("peer", "prompt_weight", "row_format"),
)
"""Kinds whose entry points name a function."""
KINDS = (
    *ROLES,
    "observer",
    "global_observer",
    "architecture",
    *FUNCTION_KINDS,
    *("collector", "loop_observer", "command", "channel", "dataset", "tokenizer", "renderer"),
)
"""Every kind of entry point: the roles of plugins, and what else a package may add."""


def group_of(kind: str) -> str:
    """Return the entry-point group of a kind."""
    return f"rlcore.{kind}s"


GROUPS = tuple(map(group_of, KINDS))
"""Every group of rlcore's."""


def as_frozen(names: Iterable[str]) -> Any:
    """Convert names to a frozenset. A bare string stays a string, for a later check to report."""
    return as_plain(names) if isinstance(names, str) else frozenset(map(as_plain, names))


def always_available() -> str | None:
    """Report no problem: the default probe, for plugins that can be used everywhere."""
    return None


def installed_in(group: str, kind: type[DescriptionT]) -> dict[str, DescriptionT]:
    """Return the objects of a group's entry points, by name. Disabled and unusable ones are left out: the driver lists them
    with their errors."""
    points = filter(_is_enabled, installed_entry_points().entry_points.select(group=group))
    return load_descriptions(tuple(points), cast("Any", kind))


@lru_cache
def load_descriptions(entry_points: tuple[EntryPoint, ...], kind: Any) -> dict[str, Any]:
    """Import what entry points name; see `installed_in`."""
    found = {}
    for entry_point in entry_points:
        try:
            with loading(f"the import of {entry_point.value}"):
                loaded: Any = entry_point.load()
                fits = loaded.spi[0] == SPI_VERSION[0] and loaded.spi[1] <= SPI_VERSION[1] and loaded.name == entry_point.name
                if isinstance(loaded, kind) and fits:
                    found[entry_point.name] = loaded
        except KeyboardInterrupt:
            raise
        except BaseException:  # an import may raise anything
            continue
    return found


def _is_enabled(entry_point: EntryPoint) -> bool:
    """Return whether RLCORE_DISABLE_PLUGINS leaves an entry point on."""
    role = entry_point.group.removeprefix("rlcore.").removesuffix("s")
    return not matching(disabled_by_variable(), role, entry_point.name, distribution_of(entry_point)[0])


def _nothing(config: object) -> frozenset[str]:  # noqa: ARG001 - the form of Provider.disabled_capabilities
    return frozenset()


def _unlimited(config: object) -> int | None:  # noqa: ARG001 - the form of Provider.max_concurrent
    return None


def _one(config: object) -> int:  # noqa: ARG001 - the form of Provider.num_devices
    return 1


def _own_kernels(config: object) -> str | None:  # noqa: ARG001 - the form of Provider.shared_kernels
    return None


@frozen(kw_only=True, field_transformer=plain_texts)
class Provider:
    """One installable implementation of a role.

    In `pyproject.toml`::

        [project.entry-points."rlcore.trainers"]
        mine = "my_package.provider:PROVIDER"

    The module it names imports nothing heavy: only `rlcore.spi`, attrs, and the config class.
    """

    name: str
    """The name a recipe uses; equal to the entry point's."""
    spi: tuple[int, int]
    """The SPI version it was written for: (major, minor)."""
    config: type
    """Frozen, keyword-only attrs class of its recipe section, every field with a docstring beneath it."""
    backend: str
    """`package.module:Class`, imported only when selected and called as Class(context, config). That of an execution may be a
    function, and returns a context manager (rlcore.spi.execution)."""
    priority: int = 0
    """`auto` takes the highest; 20 for embedded defaults, 50 general, 80 specialised. A recipe that names no sinks uses each
    one above 0."""
    capabilities: frozenset[str] = field(default=frozenset(), converter=as_frozen)
    """Names from rlcore.spi.capabilities."""
    devices: frozenset[str] = field(default=frozenset({"cpu", "cuda"}), converter=as_frozen)
    """Devices it is meant for: `auto` considers it only there; naming it runs it wherever it can. Empty where it has to be
    named, such as one that has options without defaults."""
    dtypes: frozenset[str] = field(default=frozenset({"float32", "bfloat16", "float16"}), converter=as_frozen)
    """The values of `model.dtype` that a trainer or generator computes in."""
    unavailable: Callable[[], str | None] = always_available
    """A reason why it cannot run here, with its remedy, or None. Must be quick and import nothing heavy."""
    disabled_capabilities: Callable[[Any], frozenset[str]] = _nothing
    """Capabilities that a section of the recipe takes away, such as a way to refit that its layout rules out."""
    num_devices: Callable[[Any], int] = _one
    """For generators: the devices that one spans with a section of the recipe. Where a cluster's ranks share their devices with
    generators, so many neighbours share one, which the first of them hosts."""
    shared_kernels: Callable[[Any], str | None] = _own_kernels
    """For trainers and generators: what kernels a section of the recipe has it compute by that others have too, or None. A
    trainer and a generator with the same give a token's log-probability the same bits; a run with one of them alone says so."""
    max_concurrent: Callable[[Any], int | None] = _unlimited
    """For environments: the most calls that can be at work at once with a section of the recipe, such as one for each process
    that computes; None for as many as the core likes. A call above it waits for its place before it begins, and its time limit
    with it."""
    reads_model: bool = True
    """For trainers and generators: whether `model.path` is a Hugging Face directory, or a name on the Hub. The installed
    model check then looks at the directory's files before anything is allocated. False where it is anything else, for `check`
    to judge."""
    tool_parser: str | None = None
    """For generators: `package.module:function`, called as function(name, ModelSpec) where rollout.tool_parser names a form of
    calls that is not the core's own. It returns a ParseToolCalls, or None where it does not know the name."""
    check: str | None = None
    """`package.module:function`, called as function(CheckContext, config) -> Sequence[Problem | Note] before allocation. A
    problem refuses the recipe; a note is shown, and the recipe runs."""
    plan: str | None = None
    """For trainers and generators: `package.module:function`, called by `rlcore plan` as function(PlanContext, config) ->
    Sequence[PlanOption]: every layout that the devices allow, with its memory and seconds, whether it fits or not. It imports
    nothing heavy and knows the model by its config.json alone. A model that it cannot estimate is an RlcoreError.

    For environments: one option, of which `memory` alone is asked: what the environment has all the time on the first device
    that the driver sees, such as a model that judges. An empty one says in `assumptions` why it is not known; no option, that
    nothing is there."""
    planned_options: frozenset[str] = field(default=frozenset(), converter=as_frozen)
    """For generators with a `plan`: keys of its section for which "auto" stands for what the plan says in PlanOption.options.
    Before a run on GPUs the planner (PLANNER_GROUP) asks trainer and generator for the layout of the recipe
    (PlanContext.as_configured), with what the trainer leaves of a device as `free_bytes`, and puts these values into the
    section, once and for all processes. Where that is not known, "auto" stays, and is for the backend to judge. Without a
    planner the recipe is refused."""
