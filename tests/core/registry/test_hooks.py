"""Observers: what one does wrong is told with its name and distribution, and what the backend does wrong with the backend's."""

import sys

import pytest

from rlcore.registry.plugin_errors import owner_of
from rlcore.spi import (
    ContractError,
    NonFiniteError,
    PluginError,
    SetResidencyRequest,
    SetResidencyResult,
    hookimpl,
)

ON_DEVICE = SetResidencyRequest(weights="device", state="device")
WATCH = r"observer 'Watch' \(acme-watch 1.0\)"
FAKE = r"trainer 'fake' \(in-process 0\)"


def wrapping(function):
    """An observer whose one hook, set_residency, is function(request)."""

    class Watch:
        @hookimpl(wrapper=True)
        def set_residency(self, request):
            return (yield from function(request))

    return Watch()


def forgets(request):
    yield


def replaces(request):
    yield
    return SetResidencyResult(device_bytes=-1)


def never_yields(request):
    return None
    yield


def yields_twice(request):
    yield
    yield


def reads_what_is_not_there(request):
    return (yield).no_such_figure


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (forgets, ContractError, f"^{WATCH}, around {FAKE}: set_residency returned .*: found None; expected a SetRes"),
        (replaces, ContractError, f"^{WATCH}, around {FAKE}: set_residency returned .*: device_bytes: found -1"),
        (never_yields, PluginError, f"^{WATCH}: set_residency ended without a yield"),
        (yields_twice, PluginError, f"^{WATCH}: set_residency yielded again; expected one yield"),
    ],
)
def test_a_malformed_observer_is_named_in_place_of_the_backend(make_trainer, function, error, text):
    with pytest.raises(error, match=text):
        make_trainer(observers=[wrapping(function)]).set_residency(ON_DEVICE)


def test_what_an_observer_raises_has_its_name_alone(make_trainer):
    trainer = make_trainer(observers=[wrapping(reads_what_is_not_there)])
    with pytest.raises(AttributeError) as raised:
        trainer.set_residency(ON_DEVICE)
    note = "raised by observer 'Watch' (acme-watch 1.0) after set_residency of trainer 'fake' (in-process 0)"
    assert raised.value.__notes__ == [note]
    assert owner_of(raised.value) == "observer 'Watch' (acme-watch 1.0)"
    assert not trainer.is_usable, "what the backend answered is lost"


def test_an_observer_that_raises_before_the_call_leaves_the_backend_as_it_is(make_trainer):
    def raises(request):
        raise KeyError("early")
        yield

    trainer = make_trainer(observers=[wrapping(raises)])
    with pytest.raises(KeyError) as raised:
        trainer.set_residency(ON_DEVICE)
    assert "before set_residency of trainer 'fake'" in raised.value.__notes__[0]
    assert trainer.is_usable


def test_an_observer_does_not_end_the_process(make_trainer):
    def exits(request):
        sys.exit(0)
        yield

    with pytest.raises(PluginError, match=rf"{WATCH}: set_residency: found SystemExit\(0\)"):
        make_trainer(observers=[wrapping(exits)]).set_residency(ON_DEVICE)


@pytest.mark.parametrize("function", [forgets, reads_what_is_not_there])
def test_the_backends_own_result_is_judged_first(make_trainer, function):
    trainer = make_trainer(observers=[wrapping(function)], set_residency=lambda self, request: None)
    with pytest.raises(ContractError, match=f"^{FAKE}: set_residency returned .*: found None"):
        trainer.set_residency(ON_DEVICE)


def test_a_backends_error_cannot_be_kept_back(make_trainer):
    def swallows(request):
        try:
            return (yield)
        except NonFiniteError:
            return SetResidencyResult(device_bytes=0)

    def fails(self, request):
        raise NonFiniteError("nan")

    with pytest.raises(NonFiniteError) as raised:
        make_trainer(observers=[wrapping(swallows)], set_residency=fails).set_residency(ON_DEVICE)
    assert "observer 'Watch' (acme-watch 1.0) kept this error to itself" in raised.value.__notes__[0]
    assert raised.value.__notes__[1] == "raised in set_residency of trainer 'fake' (in-process 0)"
    assert owner_of(raised.value) is None


def test_an_error_in_place_of_the_backends_tells_both(make_trainer):
    def translates(request):
        try:
            return (yield)
        except ZeroDivisionError as error:
            raise RuntimeError("translated") from error

    trainer = make_trainer(observers=[wrapping(translates)], set_residency=lambda self, request: 1 / 0)
    with pytest.raises(RuntimeError) as raised:
        trainer.set_residency(ON_DEVICE)
    assert "in place of what set_residency of trainer 'fake' (in-process 0) had raised: Zero" in raised.value.__notes__[0]
    assert not trainer.is_usable


def test_observers_pass_on_to_each_other(make_trainer):
    seen = []

    def watches(request):
        result = yield
        seen.append(result)
        return result

    def adds(request):
        result = yield
        return SetResidencyResult(device_bytes=result.device_bytes + 1)

    trainer = make_trainer(observers=[wrapping(watches), wrapping(adds), wrapping(watches)])
    assert trainer.set_residency(ON_DEVICE).device_bytes == 1
    assert [result.device_bytes for result in seen] in ([0, 1], [1, 0])
