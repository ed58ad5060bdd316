"""The generator's handle: nothing is generated before an accepted refit, and every check of what a backend returns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    ContractError,
    DataError,
    DraftCounts,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LoadStateRequest,
    LoadStateResult,
    NamedTensor,
    NonFiniteError,
    RaggedTokens,
    RefitError,
    RefitRequest,
    RefitResult,
    SamplingParams,
    SaveStateRequest,
    SetResidencyRequest,
    TensorSpec,
    WeightBucket,
    WeightExport,
    WorkerError,
    capabilities,
    hookimpl,
    tensor_digest,
)

WEIGHTS = {"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
STOP, LENGTH, ABORTED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED
END = 9


def refit_request(version=3, weights=WEIGHTS):
    specs = tuple(TensorSpec(name=name, shape=array.shape, dtype="float32") for name, array in weights.items())
    tensors = [NamedTensor(name=name, tensor=array, digest=tensor_digest(array)) for name, array in weights.items()]
    buckets = iter([WeightBucket(tensors=(tensor,)) for tensor in tensors])
    export = WeightExport(weight_version=version, specs=specs, buckets=buckets, persistent=False)
    return RefitRequest(weight_version=version, channel="in_process", weights=export, may_alias=False)


def generate_request(max_tokens=(2, 3), version=3, prompts=((1, 2),), **sampling):
    packed = RaggedTokens.from_lists(prompts)
    return GenerateRequest(
        prompts=packed,
        num_samples=len(max_tokens) // len(prompts),
        seeds=np.arange(len(max_tokens), dtype=np.int64),
        max_tokens=np.array(max_tokens, np.int32),
        sampling=SamplingParams(**sampling),
        weight_version=version,
    )


def samples(*lists, reasons, version=3, **changes):
    tokens = np.array([token for sample in lists for token in sample], np.int32)
    result = GenerateResult(
        tokens=tokens,
        offsets=np.cumsum([0, *map(len, lists)]).astype(np.int64),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        weight_versions=np.full(len(tokens), version, np.int32),
        finish_reasons=np.array(reasons, np.uint8),
    )
    return attrs.evolve(result, **changes)


@pytest.mark.parametrize(
    ("vocab_size", "prompt", "error", "text"),
    [
        (8, (1, 8), DataError, "found the token 8 in a prompt; expected tokens below 8, the model's vocabulary"),
        (5, (1, 2), ContractError, "generator 'fake' (in-process 0)"),
        (5, (1, 2), ContractError, "the generator sampled 5; expected tokens below 5, the model's vocabulary"),
        (6, (1, 5), None, ""),
        (None, (1, 99), None, ""),
    ],
)
def test_a_token_that_the_model_does_not_have_is_of_the_prompt_or_of_the_generator(
    vocab_size, prompt, error, text, make_generator, tmp_path
):
    if vocab_size is not None:
        (tmp_path / "config.json").write_text(f'{{"vocab_size": {vocab_size}}}')
    generator = make_generator(model=str(tmp_path))
    generator.refit(refit_request())
    if error is None:
        generator.generate(generate_request(prompts=(prompt,)))
        return
    with pytest.raises(error) as raised:
        generator.generate(generate_request(prompts=(prompt,)))
    assert text in str(raised.value)
    assert ("Its tokenizer is of another model" in str(raised.value)) == (error is DataError)


@pytest.fixture
def make_ready(make_generator):
    """A generator that has accepted version 3, and answers generate with a given result."""

    def make(result=None, **options):
        hooks = {} if result is None else {"generate": lambda self, request: result}
        generator = make_generator(**options, **hooks)
        generator.refit(refit_request())
        return generator

    return make


def test_after_a_refit_it_generates(make_ready):
    generator = make_ready()
    assert generator.weight_version == 3
    assert generator.generate(generate_request()).tokens.tolist() == [5] * 5


def test_nothing_is_generated_before_a_refit(make_generator):
    with pytest.raises(ContractError, match="accepted refit"):
        make_generator().generate(generate_request())


def test_another_version_than_the_one_held_is_refused(make_ready):
    with pytest.raises(ContractError, match="generate at weight version 4; .* 3"):
        make_ready().generate(generate_request(version=4))


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        ("nothing", ContractError, "found a str; expected a GenerateResult"),
        (samples([5, 5], reasons=[LENGTH]), ContractError, "found 1 samples; expected 2"),
        (
            samples([5, 5], [5] * 4, reasons=[LENGTH, LENGTH]),
            ContractError,
            "sample lengths: found 4 at sample 1; expected at most max_tokens",
        ),
        (samples([5, 5], [], reasons=[LENGTH, STOP]), ContractError, "found 0 at sample 1; expected at least 1 unless aborted"),
        (samples([5], [5] * 3, reasons=[LENGTH, LENGTH]), ContractError, "found 1 at sample 0; expected the whole limit"),
        (
            samples([5, -1], [5] * 3, reasons=[LENGTH, LENGTH]),
            ContractError,
            "tokens: found -1 at token 1; expected at least 0",
        ),
        (samples([5, 5], [5] * 3, reasons=[LENGTH, 3]), ContractError, "finish_reasons: found 3 at sample 1"),
        (
            samples([5, 5], [5] * 3, reasons=[LENGTH] * 2, version=4),
            ContractError,
            "weight_versions: found 4 at token 0; expected at most 3",
        ),
        (samples([5, 5], [5] * 3, reasons=[LENGTH] * 2, version=-1), ContractError, "weight_versions: found -1 at token 0"),
        (
            samples([5, 5], [5] * 3, reasons=[LENGTH] * 2, logprobs=np.array([-1, -1, np.nan, -1, -1], np.float32)),
            NonFiniteError,
            "logprobs: found nan at token 2",
        ),
        (
            samples([5, 5], [5] * 3, reasons=[LENGTH] * 2, logprobs=np.array([-1, -1, -1, -1, 0.5], np.float32)),
            ContractError,
            "logprobs: found 0.5 at token 4; expected at most 0.0001",
        ),
    ],
)
def test_wrong_samples_are_refused_and_the_generator_stays_usable(make_ready, result, error, text):
    generator = make_ready(result)
    with pytest.raises(error) as raised:
        generator.generate(generate_request())
    assert text in str(raised.value)
    assert generator.weight_version == 3


def test_older_versions_within_a_sample_are_allowed(make_ready):
    versions = np.array([1, 2, 2, 3, 3], np.int32)
    result = samples([5, 5], [5] * 3, reasons=[LENGTH] * 2, weight_versions=versions)
    assert make_ready(result).generate(generate_request()).weight_versions.tolist() == [1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("result", "options", "text"),
    [
        (samples([5, END], [5] * 3, reasons=[STOP, LENGTH]), {}, None),
        (samples([END], [5, 5], reasons=[STOP, ABORTED]), {}, None),
        (samples([5, 5], [], reasons=[LENGTH, ABORTED]), {}, None),
        (samples([END, 5], [5] * 3, reasons=[LENGTH] * 2), {}, "tokens: sample 0 goes on after the stop token 9"),
        (samples([5, 5], [5, END, 5], reasons=[LENGTH] * 2), {}, "tokens: sample 1 goes on after the stop token 9"),
        (
            samples([5, END], [5] * 3, reasons=[LENGTH] * 2),
            {},
            "found 1 at sample 0; expected STOP, since its last token is a stop token",
        ),
        (samples([5, 5], [5, 5], reasons=[LENGTH, STOP]), {}, "found 0 at sample 1; expected a stop token at the end"),
        (samples([5, 5], [5, 5], reasons=[LENGTH, STOP]), {"stop_strings": ("x",)}, None),
    ],
)
def test_stop_tokens_and_finish_reasons_agree(make_ready, result, options, text):
    generator = make_ready(result)
    request = generate_request(stop_token_ids=(END, 11), **options)
    if text is None:
        assert generator.generate(request) is result
        return
    with pytest.raises(ContractError) as raised:
        generator.generate(request)
    assert text in str(raised.value)


def test_the_sequence_limit_ends_a_sample_before_its_own(make_ready):
    prompt = tuple(range(13))
    result = samples([5, 5, 5], reasons=[LENGTH])
    assert make_ready(result).generate(generate_request((10,), prompts=(prompt,))) is result
    too_long = samples([5] * 4, reasons=[LENGTH])
    with pytest.raises(ContractError, match="found 4 at sample 0"):
        make_ready(too_long).generate(generate_request((10,), prompts=(prompt,)))


def test_a_prompt_that_leaves_no_room_is_refused_before_the_call(make_ready):
    with pytest.raises(ContractError, match="16 tokens.*max_sequence_length = 16"):
        make_ready().generate(generate_request((2,), prompts=(tuple(range(16)),)))


@pytest.mark.parametrize(
    ("sampling", "capability"),
    [
        ({"top_k": 5}, capabilities.TOP_K),
        ({"top_p": 0.9}, capabilities.TOP_P),
        ({"stop_strings": ("x",)}, capabilities.STOP_STRINGS),
    ],
)
def test_sampling_that_is_not_declared_is_refused(make_ready, sampling, capability):
    generator = make_ready(declared={"refit.in_process"})
    with pytest.raises(ContractError, match=f"needs the capability '{capability}'"):
        generator.generate(generate_request(**sampling))
    assert generator.generate(generate_request()).tokens.tolist() == [5] * 5


def test_a_channel_that_is_not_declared_is_refused(make_generator):
    with pytest.raises(ContractError, match=r"needs the capability 'refit\.in_process'"):
        make_generator(declared=()).refit(refit_request())


def taking_all(request):
    return {tensor.name: tensor.digest for bucket in request.weights.buckets for tensor in bucket.tensors}


def stale(self, request):
    return RefitResult(weight_version=request.weight_version, digests={**taking_all(request), "b": 1})


def forgetful(self, request):
    digests = taking_all(request)
    digests.pop("a")
    return RefitResult(weight_version=request.weight_version, digests=digests)


def inventive(self, request):
    return RefitResult(weight_version=request.weight_version, digests={**taking_all(request), "c": 1})


def hasty(self, request):
    next(request.weights.buckets)
    digests = {name: tensor_digest(array) for name, array in WEIGHTS.items()}
    return RefitResult(weight_version=request.weight_version, digests=digests)


def outdated(self, request):
    return RefitResult(weight_version=request.weight_version - 1, digests=taking_all(request))


def counting_below_zero(self, request):
    drafts = DraftCounts(num_drafts=-1)
    return RefitResult(weight_version=request.weight_version, digests=taking_all(request), drafts=drafts)


def starting(self, request):
    return RefitResult(weight_version=request.weight_version, is_starting=True)


@pytest.mark.parametrize(
    ("refit", "error", "text"),
    [
        (starting, RefitError, "is_starting: found True"),
        (stale, RefitError, "b held with other values"),
        (forgetful, RefitError, "a not acknowledged"),
        (inventive, RefitError, "c acknowledged though never sent"),
        (hasty, RefitError, "b never taken from the export"),
        (outdated, RefitError, "weight_version: found 2; expected 3"),
        (lambda self, request: None, ContractError, "found None; expected a RefitResult"),
        (lambda self, request: RefitResult(weight_version=3, digests=None), ContractError, "digests: found a NoneType"),
        (counting_below_zero, ContractError, "drafts.num_drafts: found -1"),
    ],
)
def test_a_refit_that_did_not_happen_is_an_error_and_nothing_is_generated(make_generator, refit, error, text):
    generator = make_generator(refit=refit)
    with pytest.raises(error) as raised:
        generator.refit(refit_request())
    assert text in str(raised.value)
    assert "generator 'fake' (in-process 0): refit returned what it must not" in str(raised.value)
    with pytest.raises(ContractError, match="accepted refit"):
        generator.generate(generate_request())


def test_a_refit_that_does_not_wait_may_leave_no_weights(make_generator):
    generator = make_generator(refit=starting)
    assert generator.refit(evolve(refit_request(), waits=False)).is_starting
    with pytest.raises(ContractError, match="accepted refit"):
        generator.generate(generate_request())


def test_a_failed_refit_takes_the_old_weights_away_and_the_next_good_one_heals(make_generator):
    good = make_generator().entry  # a provider to name in messages
    attempts = iter([False, True, False])

    def refit(self, request):
        if next(attempts):
            raise RuntimeError("the channel broke")
        return RefitResult(weight_version=request.weight_version, digests=taking_all(request))

    generator = make_generator(refit=refit)
    generator.refit(refit_request())
    with pytest.raises(RuntimeError) as raised:
        generator.refit(refit_request(version=4))
    assert raised.value.__notes__ == [f"raised in refit of {good.label}"]
    for version in (3, 4):
        with pytest.raises(ContractError, match="accepted refit"):
            generator.generate(generate_request(version=version))
    generator.refit(refit_request(version=4))
    assert generator.generate(generate_request(version=4)).weight_versions.tolist() == [4] * 5


def test_an_export_of_another_version_is_refused_before_the_call(make_ready):
    generator = make_ready()
    request = attrs.evolve(refit_request(version=4), weight_version=5)
    with pytest.raises(ContractError, match="version 4, the request 5"):
        generator.refit(request)
    assert generator.weight_version == 3


def test_many_wrong_tensors_are_listed_briefly(make_generator):
    weights = {f"layer.{index}": np.full(2, index, np.float32) for index in range(8)}
    generator = make_generator(
        refit=lambda self, request: RefitResult(weight_version=3, digests=dict.fromkeys(taking_all(request), 0))
    )
    with pytest.raises(RefitError, match=r"layer\.1, .* layer\.5 and 2 more"):
        generator.refit(refit_request(weights=weights))


def test_residency_of_weights_and_cache(make_ready):
    generator = make_ready()
    generator.set_residency(SetResidencyRequest(weights="device", state="host"))
    with pytest.raises(ContractError, match="generate needs .*: state"):
        generator.generate(generate_request())
    generator.refit(refit_request(version=4))
    generator.set_residency(SetResidencyRequest(weights="host", state="host"))
    with pytest.raises(ContractError, match="refit needs .*: weights"):
        generator.refit(refit_request(version=5))


@pytest.mark.parametrize(("loaded", "held"), [(-1, None), (2, None), (3, 3)])
def test_a_loaded_state_does_not_vouch_for_weights(make_generator, tmp_path, loaded, held):
    generator = make_generator(load_state=lambda self, request: LoadStateResult(weight_version=loaded))
    generator.refit(refit_request(version=3))
    generator.load_state(LoadStateRequest(directory=tmp_path))
    assert generator.weight_version == held


def test_what_keeps_no_state_leaves_the_hooks_out(make_generator, tmp_path):
    generator = make_generator()
    assert generator.save_state(SaveStateRequest(directory=tmp_path, kind="resume")).files == ()
    assert list(tmp_path.iterdir()) == []
    generator.refit(refit_request(version=3))
    generator.load_state(LoadStateRequest(directory=tmp_path))
    assert generator.weight_version is None


@pytest.mark.own_process
def test_the_checks_of_a_batch_make_few_calls_however_large_it_is(make_ready, count_calls):
    def calls(num_samples, length):
        generator = make_ready(samples(*[[5] * length] * num_samples, reasons=[LENGTH] * num_samples), max_sequence_length=1024)
        request = generate_request((length,) * num_samples, stop_token_ids=(END, 11))
        generator.generate(request)
        return count_calls(lambda: generator.generate(request))

    assert calls(512, 400) < 2 * calls(2, 4)


def test_versions_of_a_refit_in_flight_are_accepted_if_they_never_fall(make_generator):
    held = {}

    def generate(self, request):
        held["generator"].refit(refit_request(version=4))
        return samples([5, 5], [5, 5, 5], reasons=[LENGTH] * 2, weight_versions=np.array(held["versions"], np.int32))

    generator = held["generator"] = make_generator(generate=generate)
    generator.refit(refit_request())
    held["versions"] = [3, 4, 3, 4, 4]
    assert generator.generate(generate_request()).weight_versions.tolist() == [3, 4, 3, 4, 4]
    assert generator.weight_version == 4
    held["versions"] = [4, 4, 4, 3, 4]
    generator.refit(refit_request())
    with pytest.raises(ContractError, match="4 before 3 in sample 1"):
        generator.generate(generate_request())


def test_an_answer_with_new_weights_may_come_before_the_refits(make_generator):
    """The last samples can end after an engine has the new weights, and before its refit returns."""
    held, began, ended = {}, threading.Event(), threading.Event()

    def refit(self, request):
        digests = {named.name: named.digest for bucket in request.weights.buckets for named in bucket.tensors}
        if request.weight_version == 4:
            began.set()
            assert ended.wait(300)
        return RefitResult(weight_version=request.weight_version, digests=digests)

    def generate(self, request):
        held["refit"] = pool.submit(held["generator"].refit, refit_request(version=4))
        assert began.wait(300)
        return samples([5, 5], [5, 5, 5], reasons=[LENGTH] * 2, weight_versions=np.array([3, 3, 3, 4, 4], np.int32))

    with ThreadPoolExecutor(1) as pool:
        generator = held["generator"] = make_generator(generate=generate, refit=refit)
        generator.refit(refit_request())
        assert generator.generate(generate_request()).weight_versions.tolist() == [3, 3, 3, 4, 4]
        ended.set()
        held["refit"].result()
    assert generator.weight_version == 4


@pytest.mark.parametrize("capability", [capabilities.IN_FLIGHT_REFIT, capabilities.STREAMING, capabilities.DISCARD_WEIGHTS])
def test_what_is_not_declared_is_refused(make_generator, capability):
    held = {}

    def generate(self, request):
        held["generator"].refit(refit_request(version=4))

    calls = {
        capabilities.IN_FLIGHT_REFIT: lambda generator: generator.generate(generate_request()),
        capabilities.STREAMING: lambda generator: generator.generate(
            attrs.evolve(generate_request(), on_finished=lambda sample, result: None)
        ),
        capabilities.DISCARD_WEIGHTS: lambda generator: generator.set_residency(
            SetResidencyRequest(weights="host", state="host", discard_weights=True)
        ),
    }
    generator = held["generator"] = make_generator(declared=capabilities.KNOWN - {capability}, generate=generate)
    generator.refit(refit_request())
    with pytest.raises(ContractError, match=f"'{capability}'"):
        calls[capability](generator)


def test_discarded_weights_do_not_count(make_ready):
    generator = make_ready()
    generator.set_residency(SetResidencyRequest(weights="host", state="host", discard_weights=True))
    generator.set_residency(SetResidencyRequest(weights="device", state="device"))
    with pytest.raises(ContractError, match="accepted refit"):
        generator.generate(generate_request())


def test_a_dead_worker_leaves_no_weights_that_count(make_generator):
    def generate(self, request):
        raise WorkerError("engine 0 died")

    generator = make_generator(generate=generate)
    generator.refit(refit_request())
    with pytest.raises(WorkerError):
        generator.generate(generate_request())
    assert generator.weight_version is None
    assert generator.is_usable
    generator.refit(refit_request())


def test_a_worker_that_dies_as_memory_moves_is_to_be_there_after_the_next_refit(make_generator):
    asked = []

    def set_residency(self, request):
        asked.append(request)
        raise WorkerError("engine 0 died")

    @hookimpl(wrapper=True)
    def early(self, request):
        raise WorkerError("an observer's own")
        yield

    generator = make_generator(set_residency=set_residency)
    generator.refit(refit_request())
    with pytest.raises(WorkerError):
        generator.set_residency(SetResidencyRequest(weights="device", state="host"))
    assert (generator.is_usable, generator.weight_version) == (True, None)
    generator.refit(refit_request())
    with pytest.raises(ContractError, match="generate needs .*: state"):
        generator.generate(generate_request())
    watched = make_generator([type("Early", (), {"set_residency": early})()], set_residency=set_residency)
    watched.refit(refit_request())
    with pytest.raises(WorkerError, match="own"):
        watched.set_residency(SetResidencyRequest(weights="device", state="host"))
    assert len(asked) == 1
    watched.generate(generate_request())
