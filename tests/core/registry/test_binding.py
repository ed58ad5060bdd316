"""Binding: exact signatures, one backend, wrapper-only observers, and every trap of pluggy that is known."""

import functools
import sys
import time
from contextlib import nullcontext
from types import FunctionType, ModuleType

import attrs
import pytest

from rlcore.registry.binding import bind, build_algorithm, build_environment, build_generator, build_trainer
from rlcore.registry.discovery import Registry
from rlcore.registry.plugin_errors import owner_of
from rlcore.registry.provider_calls import (
    engine_tool_parser,
    import_object,
    max_concurrent,
    run_check,
    run_planner,
    shared_kernels,
)
from rlcore.spi import (
    AlgorithmContext,
    AlgorithmNeeds,
    CheckContext,
    CloseRequest,
    ContractError,
    EnvironmentContext,
    GeneratorContext,
    ModelError,
    ModelSpec,
    Note,
    PluginError,
    Problem,
    RankInfo,
    SetResidencyRequest,
    TrainerContext,
    TrainerLayout,
    hookimpl,
)

from .conftest import observing  # type: ignore[import-not-found]

MODEL = ModelSpec(path="model")
CONTEXT = TrainerContext(
    model=MODEL, rank_info=RankInfo(), seed=0, num_train_steps=1, needs_reference=False, max_sequence_length=8
)
GENERATOR_CONTEXT = GeneratorContext(model=MODEL, rank_info=RankInfo(), seed=0, max_sequence_length=8)
ON_DEVICE = SetResidencyRequest(weights="device", state="device")


@pytest.fixture
def entry(make_provider):
    (entry,) = Registry.from_providers({"trainer": [make_provider()]}).of("trainer")
    return entry


def problems_of(entry, backend_class, observers=()):
    """The lines of the PluginError with which binding refuses."""
    with pytest.raises(PluginError) as raised:
        bind(entry, backend_class(CONTEXT, None), observing(*observers))
    return str(raised.value).split("\n  - ")[1:]


def marked(function, **options):
    """A copy of the function with the hookimpl marker, which is set on the function itself."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return hookimpl(**options)(copy)


def subclass(backends, **attributes):
    return type("Backend", (backends.Trainer,), attributes)


def test_a_good_backend_binds_and_answers(entry, backends):
    manager = bind(entry, backends.Trainer(CONTEXT, None))
    assert manager.hook.set_residency(request=ON_DEVICE).device_bytes == 0


def test_missing_and_unmarked_hooks_are_found(entry, backends):
    """pluggy registers both and answers None at the call."""

    class Bare:
        layout = TrainerLayout()

        def __init__(self, context, config):
            pass

        def train_step(self, request):
            pass

    problems = problems_of(entry, Bare)
    assert "Bare.get_logprobs: missing; expected get_logprobs(request)" in problems
    assert "Bare.train_step: not marked; decorate it with rlcore.spi.hookimpl" in problems
    assert len(problems) == 7


async def asynchronous(self, request):
    return None


def generating(self, request):
    yield None


async def asynchronously_generating(self, request):
    yield None


def without_argument(self):
    return None


def with_default(self, request=None):
    return None


def keyword_only(self, *, request):
    return None


def positional_only(self, request, /):
    return None


def extra(self, request, more):
    return None


def misnamed(self, batch):
    return None


def starred(self, *args, **kwargs):
    return None


def selfless():
    return None


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (asynchronous, "Backend.train_step: an async def; expected a plain def"),
        (generating, "Backend.train_step: a generator; expected a plain def"),
        (asynchronously_generating, "Backend.train_step: a generator; expected a plain def"),
        (without_argument, "Backend.train_step: found train_step(); expected train_step(request)"),
        (with_default, "Backend.train_step: found train_step(request=None); expected train_step(request)"),
        (keyword_only, "with keyword-only parameters; expected train_step(request)"),
        (positional_only, "Backend.train_step: found train_step(request); expected train_step(request)"),
        (extra, "Backend.train_step: found train_step(request, more); expected train_step(request)"),
        (misnamed, "Backend.train_step: found train_step(batch); expected train_step(request)"),
        (starred, "Backend.train_step: found train_step(*args, **kwargs); expected train_step(request)"),
        (selfless, "Backend.train_step: takes no self; expected train_step(request)"),
    ],
)
def test_every_signature_but_the_exact_one_is_refused(entry, backends, function, text):
    (problem,) = problems_of(entry, subclass(backends, train_step=marked(function)))
    assert text in problem


@pytest.mark.parametrize("wrap", [staticmethod, classmethod])
def test_static_and_class_methods_are_refused(entry, backends, wrap):
    function = wrap(marked(lambda self, request: None))
    problems = problems_of(entry, subclass(backends, train_step=function))
    assert f"Backend.train_step: a {wrap.__name__}; expected a plain method" in problems


def test_a_callable_that_is_no_method_is_refused(entry, backends):
    partial = functools.partial(lambda request: None)
    (problem,) = [line for line in problems_of(entry, subclass(backends, train_step=partial)) if "partial" in line]
    assert problem == "Backend.train_step: a partial; expected a plain method"


def test_a_hook_set_on_the_object_is_refused(entry, backends):
    class Backend(backends.Trainer):
        def __init__(self, context, config):
            super().__init__(context, config)
            self.train_step = lambda request: None

    assert problems_of(entry, Backend) == ["Backend.train_step: set on the object; expected a method of its class"]


@pytest.mark.parametrize("options", [{"wrapper": True}, {"hookwrapper": True}])
def test_a_backend_must_not_wrap(entry, backends, options):
    problems = problems_of(entry, subclass(backends, train_step=marked(generating, **options)))
    assert "Backend.train_step: a wrapper; a backend answers itself, only observers wrap" in problems


def test_a_head_of_values_needs_its_capability_and_its_hook_and_no_reference(entry, backends, make_provider):
    context = attrs.evolve(CONTEXT, head="value")
    assert build_trainer(entry, context, backends.Config()).head == "value"
    with pytest.raises(ContractError, match="a reference beside"):
        build_trainer(entry, attrs.evolve(context, needs_reference=True), backends.Config())
    (without,) = Registry.from_providers({"trainer": [make_provider(capabilities=())]}).of("trainer")
    with pytest.raises(ContractError, match="value_head"):
        build_trainer(without, context, backends.Config())
    fields = {
        name: value for name, value in vars(backends.Trainer).items() if name not in ("get_values", "__dict__", "__weakref__")
    }
    backends.Trainer = type("Trainer", (), fields)
    with pytest.raises(PluginError, match="get_values: missing"):
        build_trainer(entry, CONTEXT, backends.Config())
    assert build_trainer(without, CONTEXT, backends.Config()).head == "tokens"


def test_a_reference_alone_needs_its_capability_and_a_reference(entry, backends, make_provider):
    context = attrs.evolve(CONTEXT, needs_policy=False)
    with pytest.raises(ContractError, match="expected needs_reference"):
        build_trainer(entry, context, backends.Config())
    context = attrs.evolve(context, needs_reference=True)
    assert build_trainer(entry, context, backends.Config()).is_usable
    (without,) = Registry.from_providers({"trainer": [make_provider(capabilities=())]}).of("trainer")
    with pytest.raises(ContractError, match="reference_alone"):
        build_trainer(without, context, backends.Config())


def test_hooks_that_the_role_has_not_are_refused(entry, backends):
    misspelt = marked(lambda self, request: None)
    (problem,) = problems_of(entry, subclass(backends, train_stpe=misspelt))
    assert problem.startswith("Backend.train_stpe: no hook of this role; its hooks are train_step, forward_backward")


def test_answering_by_another_name_is_refused(entry, backends):
    other = hookimpl(specname="train_step")(lambda self, request: None)
    assert any("by specname" in problem for problem in problems_of(entry, subclass(backends, other=other)))


def test_all_problems_come_at_once(entry, backends):
    broken = {"train_step": marked(asynchronous), "close": marked(extra), "get_logprobs": marked(with_default)}
    assert len(problems_of(entry, subclass(backends, **broken))) == 3


def test_nothing_is_built_or_called_when_a_signature_is_wrong(entry, backends):
    built = []

    class Backend(backends.Trainer):
        def __init__(self, context, config):
            built.append(self)

        train_step = marked(with_default)

    backends.Trainer = Backend
    with pytest.raises(PluginError, match=r"1 problem\(s\)"):
        build_trainer(entry, CONTEXT, backends.Config())
    assert built == []


def test_a_decorated_hook_keeps_its_signature(entry, backends):
    """As torch.no_grad does: a wrapper that names what it wraps."""
    plain = backends.Trainer.set_residency

    @functools.wraps(plain)
    def wrapped(*args, **kwargs):
        return plain(*args, **kwargs)

    manager = bind(entry, subclass(backends, set_residency=wrapped)(CONTEXT, None))
    assert manager.hook.set_residency(request=ON_DEVICE).device_bytes == 0


def test_equal_objects_do_not_collide(entry, backends):
    """pluggy compares what it registers with ==, and two attrs objects without fields are equal."""

    @attrs.define
    class Watch:
        @hookimpl(wrapper=True)
        def set_residency(self, request):
            return (yield)

    class Backend(backends.Trainer):
        def __eq__(self, other):
            return True

        __hash__ = None

    manager = bind(entry, Backend(CONTEXT, None), observing(Watch(), Watch()))
    assert manager.hook.set_residency(request=ON_DEVICE).device_bytes == 0


def test_properties_are_not_evaluated(entry, backends):
    class Backend(backends.Trainer):
        @property
        def dangerous(self):
            raise RuntimeError("evaluated")

    assert bind(entry, Backend(CONTEXT, None)).hook.set_residency(request=ON_DEVICE).device_bytes == 0


def test_two_managers_share_nothing(entry, backends):
    first, second = backends.Trainer(CONTEXT, None), backends.Trainer(CONTEXT, None)
    bind(entry, first)
    bind(entry, second).hook.close(request=CloseRequest())
    assert (first.calls, second.calls) == ([], ["close"])


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def set_residency(self, request):
        result = yield
        self.seen.append((request, result))
        return result

    @hookimpl(wrapper=True)
    def generate(self, request):
        return (yield)


def test_observers_see_calls_of_the_roles_they_know(make_trainer, make_generator):
    watch = Recorder()
    make_trainer(observers=[watch]).set_residency(ON_DEVICE)
    make_generator(observers=[watch]).set_residency(ON_DEVICE)
    assert [request for request, _ in watch.seen] == [ON_DEVICE, ON_DEVICE]


def test_a_module_may_observe(entry, backends):
    module = ModuleType("watching")
    module.set_residency = marked(_watch, wrapper=True)
    assert (
        bind(entry, backends.Trainer(CONTEXT, None), observing(module)).hook.set_residency(request=ON_DEVICE).device_bytes == 0
    )


def _watch(request):
    return (yield)


@pytest.mark.parametrize(
    ("hook", "function", "text"),
    [
        ("train_step", marked(lambda request: None), "not a wrapper"),
        ("train_step", marked(_watch, hookwrapper=True), "not a wrapper"),
        ("train_step", marked(lambda request: None, wrapper=True), "no generator"),
        ("train_stepp", marked(_watch, wrapper=True), "no hook of any role"),
        ("train_step", marked(generating, wrapper=True), "found train_step(self, request); expected train_step(request)"),
    ],
)
def test_observers_only_wrap_known_hooks(entry, backends, hook, function, text):
    observer = ModuleType("watching")
    setattr(observer, hook, function)
    (problem,) = problems_of(entry, backends.Trainer, [observer])
    assert problem.startswith(f"observer 'watching' (acme-watch 1.0): {hook}: ")
    assert text in problem


def test_an_observer_without_hooks_is_refused(entry, backends):
    (problem,) = problems_of(entry, backends.Trainer, [object()])
    assert "no hooks" in problem


def test_an_observer_that_waits_for_metrics_is_refused(entry, backends):
    class Waits(Recorder):
        def after_step(self, metrics):
            raise AssertionError

    (problem,) = problems_of(entry, backends.Trainer, [Waits()])
    assert (
        problem
        == "observer 'Waits' (acme-watch 1.0): after_step: never called, since observers receive no metrics; write a sink"
    )


@pytest.mark.parametrize("layout", [None, "rank 0", TrainerLayout(data_parallel_rank=2, data_parallel_size=2)])
def test_a_trainer_has_a_layout(entry, backends, layout):
    class Backend(backends.Trainer):
        def __init__(self, context, config):
            self.layout = layout

    backends.Trainer = Backend
    with pytest.raises(PluginError, match=r"layout: found .*; expected a TrainerLayout"):
        build_trainer(entry, CONTEXT, backends.Config())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_module:Backend", "No module named 'no_such_module'"),
        ("fake_backends:Absent", "Absent"),
        ("fake_backends:function", "is a function; expected a class"),
    ],
)
def test_a_backend_that_cannot_be_imported_names_plugin_and_path(make_provider, backends, path, text):
    backends.function = lambda context, config: None
    (entry,) = Registry.from_providers({"trainer": [make_provider(backend=path)]}).of("trainer")
    with pytest.raises(PluginError) as raised:
        build_trainer(entry, CONTEXT, backends.Config())
    assert "trainer 'fake' (in-process 0)" in str(raised.value)
    assert text in str(raised.value)


def test_what_a_constructor_raises_passes_unchanged_with_a_note(entry, backends):
    class Backend(backends.Trainer):
        def __init__(self, context, config):
            raise ModelError([Problem(path="model", found="no weights", expected="safetensors")])

    backends.Trainer = Backend
    with pytest.raises(ModelError) as raised:
        build_trainer(entry, CONTEXT, backends.Config())
    assert raised.value.__notes__ == ["raised while building trainer 'fake' (in-process 0)"]
    assert owner_of(raised.value) == "trainer 'fake' (in-process 0)"


def test_a_constructor_takes_context_and_config(entry, backends):
    class Backend(backends.Trainer):
        def __init__(self, config):
            raise AssertionError("called")

    backends.Trainer = Backend
    with pytest.raises(PluginError, match=r"trainer 'fake' .*: Backend .*\(config\).*\(context, config\)"):
        build_trainer(entry, CONTEXT, backends.Config())


def test_a_constructor_does_not_end_the_process(entry, backends):
    class Backend(backends.Trainer):
        def __init__(self, context, config):
            sys.exit(0)

    backends.Trainer = Backend
    with pytest.raises(PluginError, match=r"building trainer 'fake' .*SystemExit\(0\)"):
        build_trainer(entry, CONTEXT, backends.Config())


@pytest.mark.parametrize("raised", ["SystemExit(0)", "type('PanicException', (BaseException,), {})(0)"])
def test_nor_does_an_import(entry, tmp_path, monkeypatch, raised):
    monkeypatch.delitem(sys.modules, "ends_at_import", raising=False)
    (tmp_path / "ends_at_import.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="cannot be imported from 'ends_at_import:Backend': (SystemExit|PanicException): 0"):
        import_object(entry, "ends_at_import:Backend")


def test_the_config_must_be_the_providers(entry, backends):
    with pytest.raises(ContractError, match="dict.*FakeConfig"):
        build_trainer(entry, CONTEXT, {})


def test_an_entry_is_built_in_its_own_role_only(entry, backends):
    with pytest.raises(ContractError, match="as a generator"):
        build_generator(entry, GENERATOR_CONTEXT, backends.Config())


def test_a_disabled_entry_cannot_be_built(entry, backends):
    with pytest.raises(PluginError, match="not usable: disabled"):
        build_trainer(attrs.evolve(entry, provider=None, disabled=True), CONTEXT, backends.Config())


class GoodAlgorithm:
    needs = AlgorithmNeeds(source="rollouts")

    def __init__(self, context, config):
        self.context = context

    def build_batch(self, rollouts):
        return rollouts


class GoodEnvironment:
    def __init__(self, context, config):
        self.context = context

    async def reset(self, row, seed):
        return row, seed

    async def step(self, state, turn):
        return state, turn

    def rows(self, split):
        return None


ALGORITHM_CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=2, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=False
)


@pytest.fixture
def plain_entry(make_provider, backends):
    def make(role, cls):
        backends.Plain = cls
        return Registry.from_providers({role: [make_provider(backend="fake_backends:Plain")]}).of(role)[0]

    return make


def test_an_algorithm_is_a_plain_object(plain_entry, backends):
    built = build_algorithm(plain_entry("algorithm", GoodAlgorithm), ALGORITHM_CONTEXT, backends.Config())
    assert built.needs.source == "rollouts"


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"needs": None}, "needs: found None; expected an AlgorithmNeeds"),
        (
            {"build_batch": lambda self, batch: batch},
            "Algo.build_batch: found build_batch(batch); expected build_batch(rollouts)",
        ),
        ({"build_batch": None}, "Algo.build_batch: missing; expected build_batch(rollouts)"),
    ],
)
def test_an_algorithm_with_wrong_methods_is_refused(plain_entry, backends, attributes, text):
    cls = type("Algo", (GoodAlgorithm,), attributes)
    with pytest.raises(PluginError) as raised:
        build_algorithm(plain_entry("algorithm", cls), ALGORITHM_CONTEXT, backends.Config())
    assert text in str(raised.value)


def test_an_environment_is_a_plain_object(plain_entry, backends):
    built = build_environment(plain_entry("environment", GoodEnvironment), EnvironmentContext(seed=0), backends.Config())
    assert isinstance(built, GoodEnvironment)


async def asynchronous_rows(self, split):
    return None


async def asynchronous_close(self):
    pass


def test_an_environment_with_wrong_methods_is_refused_with_all_of_them(plain_entry, backends):
    attributes = {"reset": lambda self, row, seed: None, "step": None, "rows": asynchronous_rows, "close": asynchronous_close}
    cls = type("World", (GoodEnvironment,), attributes)
    with pytest.raises(PluginError) as raised:
        build_environment(plain_entry("environment", cls), EnvironmentContext(seed=0), backends.Config())
    assert str(raised.value).split("\n  - ")[1:] == [
        "World.reset: a plain def; expected an async def",
        "World.step: missing; expected async step(state, turn)",
        "World.rows: an async def; expected a plain def",
        "World.close: an async def; expected a plain def",
    ]


class GoodAgents:
    def __init__(self, context, config):
        pass

    async def run(self, row, seed, session):
        return None

    def rows(self, split):
        return None


def test_an_agent_environment_has_another_method(make_provider, backends):
    context, config = EnvironmentContext(seed=0), backends.Config()

    def build(cls, *declared):
        provider = make_provider(capabilities=set(declared), backend=f"{__name__}:{cls.__name__}")
        entry = Registry.from_providers({"environment": [provider]}).of("environment")[0]
        return build_environment(entry, context, config)

    assert isinstance(build(GoodAgents, "agent"), GoodAgents)
    with pytest.raises(PluginError, match=r"reset: missing"):
        build(GoodAgents)
    with pytest.raises(PluginError, match=r"run: missing"):
        build(GoodEnvironment, "agent")


@pytest.mark.parametrize("said", [None, 1, 64])
def test_an_environments_provider_bounds_its_calls(make_provider, said):
    provider = make_provider(max_concurrent=lambda config: said and config * said)
    entry = Registry.from_providers({"environment": [provider]}).of("environment")[0]
    assert max_concurrent(entry, 1) == said
    plain = Registry.from_providers({"environment": [make_provider()]}).of("environment")[0]
    assert max_concurrent(plain, 1) is None


@pytest.mark.parametrize("said", [0, -1, 2.0, True, "2"])
def test_a_bound_that_is_no_number_of_calls_is_refused(make_provider, said):
    entry = Registry.from_providers({"environment": [make_provider(max_concurrent=lambda config: said)]}).of("environment")[0]
    with pytest.raises(PluginError, match="environment 'fake' .*max_concurrent"):
        max_concurrent(entry, None)


def test_a_backends_provider_names_the_kernels_that_it_shares(make_provider):
    def entry_of(said):
        provider = make_provider(shared_kernels=lambda config: said and said + config)
        return Registry.from_providers({"trainer": [provider]}).of("trainer")[0]

    assert (shared_kernels(entry_of("a"), "b"), shared_kernels(entry_of(None), "b")) == ("ab", None)
    with pytest.raises(PluginError, match="trainer 'fake' .*shared_kernels"):
        shared_kernels(entry_of(1), 1)
    with pytest.raises(PluginError, match="trainer 'fake' .*shared_kernels.* TypeError"):
        shared_kernels(entry_of("a"), 1)


def test_a_generators_provider_brings_parsers_of_tools_calls(make_provider, tmp_path, monkeypatch):
    (tmp_path / "parsing.py").write_text(
        "def parser(name, model):\n    return {'own': lambda text, tools: (model, [])}.get(name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    providers = make_provider(tool_parser="parsing:parser"), make_provider()
    entry, plain = (Registry.from_providers({"generator": [one]}).of("generator")[0] for one in providers)
    assert engine_tool_parser(entry, MODEL, "own")("", ()) == (MODEL, [])
    assert engine_tool_parser(entry, MODEL, "another") is None
    assert engine_tool_parser(plain, MODEL, "own") is None


CHECK_CONTEXT = CheckContext(model=MODEL, device="cpu", world_size=1, max_sequence_length=8)
PROBLEM = Problem(path="trainer.fake.size", found="1", expected="2")


@pytest.fixture
def entry_with_check(make_provider, monkeypatch):
    def make(function):
        module = ModuleType("fake_checks")
        module.check = function
        monkeypatch.setitem(sys.modules, "fake_checks", module)
        return Registry.from_providers({"trainer": [make_provider(check="fake_checks:check")]}).of("trainer")[0]

    return make


def test_a_providers_check_reports_its_problems(entry, entry_with_check):
    assert run_check(entry, CHECK_CONTEXT, None) == ()
    assert run_check(entry_with_check(lambda context, config: [PROBLEM]), CHECK_CONTEXT, None) == (PROBLEM,)
    note = Note(path="trainer.fake.size", text="small")
    assert run_check(entry_with_check(lambda context, config: iter([note])), CHECK_CONTEXT, None) == (note,)


@pytest.mark.parametrize("returned", [["wrong"], None, PROBLEM, "wrong", 3])
def test_a_check_that_returns_something_else_is_refused(entry_with_check, returned):
    with pytest.raises(PluginError, match=r"trainer 'fake' .*: check 'fake_checks:check' returned "):
        run_check(entry_with_check(lambda context, config: returned), CHECK_CONTEXT, None)


async def asynchronous_check(context, config):
    return []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("no function", "is a str; expected a function"),
        (asynchronous_check, "is an async def; expected a function"),
        (lambda config: [], r"check 'fake_checks:check' takes \(config\); expected \(context, config\)"),
        (lambda context, config, *, more: [], r"takes \(context, config, \*, more\); expected"),
        (lambda context, config: sys.exit(0), r"raised by the check of trainer 'fake' .*: found SystemExit\(0\)"),
    ],
)
def test_a_check_that_cannot_be_called_so_is_refused(entry_with_check, check, text):
    with pytest.raises(PluginError, match=text):
        run_check(entry_with_check(check), CHECK_CONTEXT, None)


def test_a_check_that_raises_is_named(entry_with_check):
    def check(context, config):
        raise KeyError("layers")

    with pytest.raises(KeyError) as raised:
        run_check(entry_with_check(check), CHECK_CONTEXT, None)
    assert raised.value.__notes__ == ["raised by the check of trainer 'fake' (in-process 0)"]


def test_import_object_finds_what_a_path_names(entry, backends):
    assert import_object(entry, "fake_backends:Trainer") is backends.Trainer


def late(*_: object) -> None:
    time.sleep(60)


LATE = {
    "max_concurrent": ("environment", {"max_concurrent": late}, max_concurrent),
    "shared_kernels": ("trainer", {"shared_kernels": late}, shared_kernels),
    "the check": ("sink", {"check": f"{__name__}:late"}, lambda entry, config: run_check(entry, None, config)),
    "the plan": ("trainer", {"plan": f"{__name__}:late"}, lambda entry, config: run_planner(entry, None, config)),
    "the building": (
        "algorithm",
        {"backend": f"{__name__}:LateAlgorithm"},
        lambda entry, config: build_algorithm(entry, None, config),
    ),
    "the building: of another role": (
        "environment",
        {"backend": f"{__name__}:LateEnvironment"},
        lambda entry, config: build_environment(entry, None, config),
    ),
}


class LateAlgorithm(GoodAlgorithm):
    def __init__(self, context, config):
        late()


class LateEnvironment:
    def __init__(self, context, config):
        late()

    def rows(self, split):
        return None

    async def reset(self, row, seed): ...

    async def step(self, state, turn): ...


@pytest.mark.parametrize(("role", "options", "ask"), LATE.values(), ids=LATE)
def test_what_a_plugin_is_asked_before_a_run_has_a_limit(make_provider, backends, monkeypatch, request, role, options, ask):
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.005)
    monkeypatch.setattr("rlcore.registry.discovery.in_time", nullcontext)  # the first search for packages takes longer
    (entry,) = (one for one in Registry.from_providers({role: [make_provider(**options)]}).of(role) if one.name == "fake")
    what = request.node.callspec.id.partition(":")[0]
    with pytest.raises(PluginError, match=rf"{what} of {role} 'fake' \(in-process 0\) .* s"):
        ask(entry, backends.Config())
