"""Generators that are each wrong in one known way, made from the fake; each names the check that has to fail."""

import numpy as np
from attrs import evolve
from mutants import killed_by

from rlcore.spi import FinishReason, LoadStateResult, RaggedTokens, RefitResult, SamplingMask, StreamResult, hookimpl
from rlcore.testing.fakes import generator as fake
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.policy import log_softmax

LOGPROBS = "test_logprobs_are_those_of_the_distribution_sampled_from"
MANY = "test_many_tokens_are_those_of_the_distribution"


class ChangedModule(FakeGenerator):
    """Replaces functions of the fake's module while it generates."""

    @hookimpl
    def generate(self, request):
        replaced = {name: getattr(fake, name) for name in ("choose", "truncate", "uniforms") if hasattr(self, f"my_{name}")}
        for name in replaced:
            setattr(fake, name, getattr(self, f"my_{name}"))
        self.original = replaced
        try:
            return super().generate(request)
        finally:
            for name, function in replaced.items():
                setattr(fake, name, function)


class ChangedRequest(FakeGenerator):
    @hookimpl
    def generate(self, request):
        return super().generate(self.changed(request))


class ChangedResult(FakeGenerator):
    @hookimpl
    def generate(self, request):
        return self.changed(request, super().generate(request))


@killed_by(LOGPROBS)
class RawLogprobs(ChangedModule):
    def my_choose(self, values, sampling, uniform):
        chosen, _ = self.original["choose"](values, sampling, uniform)
        return chosen, log_softmax(values)[np.arange(len(chosen)), chosen]


@killed_by(LOGPROBS)
class LogprobsBeforeTruncation(ChangedModule):
    def my_choose(self, values, sampling, uniform):
        chosen, logprobs = self.original["choose"](values, sampling, uniform)
        if sampling.temperature == 0.0:
            return chosen, logprobs
        return chosen, log_softmax(values / sampling.temperature)[np.arange(len(chosen)), chosen]


@killed_by(MANY)
class LogprobsWrongFromToken48(ChangedResult):
    def changed(self, request, result):
        position = np.arange(len(result.tokens)) - np.repeat(result.offsets[:-1], np.diff(result.offsets))
        return evolve(result, logprobs=np.where(position < 48, result.logprobs, result.logprobs - 1).astype(np.float32))


@killed_by(MANY)
class LateLogprobsWithoutTemperature(ChangedResult):
    """Those of a distribution that is wider by a tenth, of cool samples alone."""

    def changed(self, request, result):
        position = np.arange(len(result.tokens)) - np.repeat(result.offsets[:-1], np.diff(result.offsets))
        wrong = (position >= 48) & (request.sampling.temperature == 0.6)
        return evolve(result, logprobs=np.where(wrong, 0.9 * result.logprobs, result.logprobs).astype(np.float32))


@killed_by("test_frequencies_are_those_of_the_distribution")
class SamplesIgnoreTheTemperature(ChangedModule):
    """The log-probabilities reported are those asked for."""

    def my_choose(self, values, sampling, uniform):
        chosen, _ = self.original["choose"](values, evolve(sampling, temperature=0.7), uniform)
        table = log_softmax(fake.truncate(values / max(sampling.temperature, 1e-3), sampling))
        return chosen, table[np.arange(len(chosen)), chosen]


@killed_by(LOGPROBS)
class TopKOffByOne(ChangedModule):
    def my_truncate(self, values, sampling):
        return self.original["truncate"](values, evolve(sampling, top_k=sampling.top_k + bool(sampling.top_k)))


@killed_by(LOGPROBS)
class TopPWithoutTheTokenThatReachesIt(ChangedModule):
    def my_truncate(self, values, sampling):
        kept = self.original["truncate"](values, sampling)
        if sampling.top_p < 1.0:
            for row in kept:
                if np.isfinite(row).sum() > 1:
                    row[np.where(np.isfinite(row), row, np.inf).argmin()] = -np.inf
        return kept


@killed_by(LOGPROBS)
class TopPIgnoredAtTemperatureOne(ChangedRequest):
    def changed(self, request):
        sampling = request.sampling
        return evolve(request, sampling=evolve(sampling, top_p=1.0)) if sampling.temperature == 1.0 else request


@killed_by(LOGPROBS)
class TopPBeforeTopK(ChangedModule):
    def my_truncate(self, values, sampling):
        by_mass = self.original["truncate"](values, evolve(sampling, top_k=0))
        return np.where(np.isfinite(by_mass), self.original["truncate"](values, evolve(sampling, top_p=1.0)), -np.inf)


@killed_by("test_greedy_takes_the_most_probable_token")
class GreedySamples(ChangedModule):
    def my_choose(self, values, sampling, uniform):
        return self.original["choose"](values, evolve(sampling, temperature=sampling.temperature or 1.0), uniform)


@killed_by("test_same_seeds_give_the_same_samples")
class SeedsIgnored(ChangedModule):
    def my_uniforms(self, seeds, step):
        return np.random.random(len(seeds))


@killed_by(MANY)
class SeedsModulo65536(ChangedModule):
    def my_uniforms(self, seeds, step):
        return self.original["uniforms"](self.known(seeds), step)

    def known(self, seeds):
        return seeds & 0xFFFF


@killed_by(MANY)
class SeedsOfThirtyTwoBits(SeedsModulo65536):
    def known(self, seeds):
        return seeds & 0xFFFFFFFF


@killed_by(MANY)
class SeedsAsFloats(SeedsModulo65536):
    def known(self, seeds):
        return seeds.astype(np.float64).astype(np.int64)


@killed_by("test_same_seeds_give_the_same_samples")
class OneSeedForever(ChangedModule):
    def my_uniforms(self, seeds, step):
        return self.original["uniforms"](np.arange(len(seeds)), step)


@killed_by("test_a_sample_does_not_depend_on_the_batch_around_it")
class SeedOfTheFirstSample(ChangedModule):
    def my_uniforms(self, seeds, step):
        return self.original["uniforms"](seeds[0] + np.arange(len(seeds)), step)


@killed_by("test_a_sample_does_not_depend_on_the_batch_around_it")
class SeedsOfTheRow(ChangedModule):
    def my_uniforms(self, seeds, step):
        return self.original["uniforms"](seeds + np.arange(len(seeds)), step)


@killed_by("test_frequencies_are_those_of_the_distribution")
class OneNumberASample(ChangedModule):
    def my_uniforms(self, seeds, step):
        return self.original["uniforms"](seeds, 0)


@killed_by("test_frequencies_are_those_of_the_distribution")
class OneNoiseASample(OneNumberASample):
    """As a sampler that seeds its noise anew for every token."""

    def my_choose(self, values, sampling, uniform):
        if sampling.temperature == 0.0:
            return self.original["choose"](values, sampling, uniform)
        table = log_softmax(fake.truncate(values / sampling.temperature, sampling))
        noise = np.stack([np.random.default_rng(int(u * 2**53)).gumbel(size=values.shape[1]) for u in uniform])
        chosen = (table + noise).argmax(axis=1)
        return chosen, table[np.arange(len(chosen)), chosen]


@killed_by("test_frequencies_are_those_of_the_distribution")
class NeighbouringSeedsAlike(ChangedModule):
    def my_uniforms(self, seeds, step):
        return (seeds * 0.01 + step * 0.37) % 1.0


@killed_by("test_frequencies_are_those_of_the_distribution")
class NumbersNotUniform(ChangedModule):
    def my_uniforms(self, seeds, step):
        return self.original["uniforms"](seeds, step) ** 1.5


@killed_by(LOGPROBS)
class FirstPromptTokenDropped(ChangedRequest):
    def changed(self, request):
        prompts = [request.prompts.sequence(index) for index in range(request.prompts.num_sequences)]
        shorter = RaggedTokens.from_lists([prompt[1:].tolist() or prompt.tolist() for prompt in prompts])
        return evolve(request, prompts=shorter)


@killed_by(LOGPROBS)
class SamplesOfAPromptApart(ChangedResult):
    """Sample s of prompt p is number s * P + p; the limits are kept, so that only the order is wrong."""

    def changed(self, request, result):
        prompts = [request.prompts.sequence(index).tolist() for index in range(request.prompts.num_sequences)]
        repeated = RaggedTokens.from_lists(prompts * request.num_samples)
        return super(ChangedResult, self).generate(evolve(request, prompts=repeated, num_samples=1))


@killed_by("test_a_limit_cuts_exactly_and_is_called_one")
class CutShort(ChangedRequest):
    @hookimpl
    def generate(self, request):
        result = super().generate(request)
        return evolve(result, finish_reasons=np.full_like(result.finish_reasons, FinishReason.ABORTED))

    def changed(self, request):
        return evolve(request, max_tokens=np.maximum(request.max_tokens - 1, 1).astype(np.int32))


@killed_by("test_a_limit_cuts_exactly_and_is_called_one")
class LengthCalledStop(ChangedResult):
    def changed(self, request, result):
        return evolve(result, finish_reasons=np.full_like(result.finish_reasons, FinishReason.STOP))


@killed_by("test_stop_strings_end_a_sample")
class LengthCalledStopWithStrings(ChangedResult):
    def changed(self, request, result):
        reasons = np.full_like(result.finish_reasons, FinishReason.STOP)
        return evolve(result, finish_reasons=reasons) if request.sampling.stop_strings else result


@killed_by("test_a_limit_cuts_exactly_and_is_called_one")
class LimitOfTheFirstSample(ChangedRequest):
    def changed(self, request):
        return evolve(request, max_tokens=np.minimum(request.max_tokens, request.max_tokens[0]))


@killed_by("test_a_limit_cuts_exactly_and_is_called_one")
class EndTokenAlwaysStops(ChangedRequest):
    def changed(self, request):
        return evolve(request, sampling=evolve(request.sampling, stop_token_ids=(*request.sampling.stop_token_ids, 0)))


@killed_by("test_the_sequence_limit_cuts")
class SequenceLimitTakesOneMore(FakeGenerator):
    def __init__(self, context, config):
        super().__init__(evolve(context, max_sequence_length=context.max_sequence_length + 1), config)


@killed_by("test_stop_tokens_end_a_sample")
class OnlyTheFirstStopToken(ChangedRequest):
    def changed(self, request):
        return evolve(request, sampling=evolve(request.sampling, stop_token_ids=request.sampling.stop_token_ids[:1]))


@killed_by("test_stop_tokens_end_a_sample")
class StopTokensIgnoredAfter20Tokens(FakeGenerator):
    def stopped(self, tokens, sampling):
        return super().stopped(tokens, evolve(sampling, stop_token_ids=()) if tokens.shape[1] > 20 else sampling)


@killed_by("test_stop_tokens_end_a_sample")
class StopAtTheLimitCalledLength(ChangedResult):
    def changed(self, request, result):
        at_limit = np.diff(result.offsets) == request.max_tokens
        return evolve(result, finish_reasons=np.where(at_limit, FinishReason.LENGTH, result.finish_reasons).astype(np.uint8))


@killed_by("test_stop_strings_end_a_sample")
class StopStringsIgnored(ChangedRequest):
    def changed(self, request):
        return evolve(request, sampling=evolve(request.sampling, stop_strings=()))


@killed_by("test_stop_strings_end_a_sample")
class StopStringsOnlyInsideOneToken(FakeGenerator):
    def stopped(self, tokens, sampling):
        return super().stopped(tokens[:, -1:], sampling)


@killed_by("test_stop_strings_end_a_sample")
class StopStringsCompletedWithoutALogprob(ChangedResult):
    def changed(self, request, result):
        completes = result.offsets[1:][result.finish_reasons == FinishReason.STOP] - 1
        is_wrong = np.isin(np.arange(len(result.tokens)), completes) & bool(request.sampling.stop_strings)
        return evolve(result, logprobs=np.where(is_wrong, 0.0, result.logprobs).astype(np.float32))


@killed_by("test_stop_strings_end_long_samples")
class StopStringsIgnoredAfter20Tokens(FakeGenerator):
    def stopped(self, tokens, sampling):
        return super().stopped(tokens, evolve(sampling, stop_strings=sampling.stop_strings if self.seen(tokens) else ()))

    def seen(self, tokens):
        return tokens.shape[1] <= 20


@killed_by("test_stop_strings_end_long_samples")
class StopStringsIgnoredFromToken30To50(StopStringsIgnoredAfter20Tokens):
    def seen(self, tokens):
        return not 30 <= tokens.shape[1] < 50


@killed_by("test_stop_strings_end_a_sample")
class StopStringsInThePromptToo(FakeGenerator):
    @hookimpl
    def generate(self, request):
        prompts = [self.tokenizer.decode(request.prompts.sequence(i)) for i in range(request.prompts.num_sequences)]
        self.said = any(string in prompt for prompt in prompts for string in request.sampling.stop_strings)
        return super().generate(request)

    def stopped(self, tokens, sampling):
        return super().stopped(tokens, sampling) | self.said


@killed_by("test_each_refit_counts")
class FirstWeightsForever(FakeGenerator):
    """Acknowledges what it receives."""

    def take(self, weights, weight_version):
        super().take(self.weights or weights, weight_version)


@killed_by("test_each_refit_counts")
class OneTensorForever(FakeGenerator):
    def take(self, weights, weight_version):
        name = "origin.weight"
        super().take({**weights, name: self.weights.get(name, weights[name])}, weight_version)


@killed_by("test_each_refit_counts")
class OneRefitBehind(FakeGenerator):
    def take(self, weights, weight_version):
        behind = self.__dict__.get("next_weights", weights)
        self.next_weights = weights
        super().take(behind, weight_version)


@killed_by("test_each_refit_counts")
class PromptsCachedOverRefits(ChangedModule):
    """The logits of a prompt it has seen are not computed again."""

    def __init__(self, context, config):
        super().__init__(context, config)
        self.cached = {}

    @hookimpl
    def generate(self, request):
        self.key, self.num_chosen = request.prompts.tokens.tobytes(), 0
        return super().generate(request)

    def my_choose(self, values, sampling, uniform):
        if self.num_chosen == 0:
            values = self.cached.setdefault((self.key, len(values)), values)
        self.num_chosen += 1
        return self.original["choose"](values, sampling, uniform)


@killed_by("test_each_refit_counts")
class VersionOfTheFirstRefit(ChangedResult):
    def changed(self, request, result):
        return evolve(result, weight_versions=np.zeros_like(result.weight_versions))


@killed_by("test_refit_acknowledges_what_it_holds")
class VersionZeroAcknowledged(FakeGenerator):
    @hookimpl
    def refit(self, request):
        return evolve(super().refit(request), weight_version=0)


@killed_by("test_refit_that_went_wrong_is_an_error")
class DigestsEchoed(FakeGenerator):
    """Takes what comes, and acknowledges what was sent along with it."""

    @hookimpl
    def refit(self, request):
        received = {n.name: (np.array(n.tensor), n.digest) for bucket in request.weights.buckets for n in bucket.tensors}
        self.take({name: value for name, (value, _) in received.items()}, request.weight_version)
        digests = {name: digest for name, (_, digest) in received.items()}
        return RefitResult(weight_version=request.weight_version, digests=digests)


@killed_by("test_copies_stay_when_the_trainer_moves_on")
class PersistentTensorsKept(FakeGenerator):
    @hookimpl
    def refit(self, request):
        return super().refit(evolve(request, may_alias=True))


@killed_by("test_each_refit_counts")
class BucketsKept(FakeGenerator):
    @hookimpl
    def refit(self, request):
        return super().refit(evolve(request, may_alias=True, weights=evolve(request.weights, persistent=True)))


@killed_by("test_shared_tensors_are_good_for_the_next_refit")
class SharedTensorsWrittenTo(FakeGenerator):
    def take(self, weights, weight_version):
        super().take({name: value.copy() for name, value in weights.items()}, weight_version)
        for value in weights.values():
            value[0] = 0.0


@killed_by("test_shared_tensors_are_good_for_the_next_refit")
class SharedTensorsReadOnce(FakeGenerator):
    @hookimpl
    def refit(self, request):
        kept = self.weights
        result = super().refit(request)
        if request.may_alias:
            self.weights = kept or {name: value.copy() for name, value in self.weights.items()}
        return result


@killed_by("test_results_are_not_overwritten_by_later_calls")
class AliasedResults(ChangedResult):
    def changed(self, request, result):
        buffer = self.__dict__.setdefault("buffer", np.zeros(10_000, np.float32))
        buffer[: len(result.logprobs)] = result.logprobs
        return evolve(result, logprobs=buffer[: len(result.logprobs)])


@killed_by("test_moving_to_the_host_and_back_changes_nothing")
class WeightsLostOnTheHost(FakeGenerator):
    @hookimpl
    def set_residency(self, request):
        if request.weights == "host":
            self.weights = {name: 0 * value for name, value in self.weights.items()}
        return super().set_residency(request)


@killed_by("test_refit_while_the_cache_is_away")
class RefitUndoneByWakingUp(FakeGenerator):
    @hookimpl
    def set_residency(self, request):
        if request.weights == "host":
            self.asleep = self.weights
        if request.state == "device":
            self.weights = self.__dict__.get("asleep", self.weights)
        return super().set_residency(request)


@killed_by("test_saved_state_holds_no_weights")
class LoadedStateClaimsWeights(FakeGenerator):
    @hookimpl
    def load_state(self, request):
        return LoadStateResult(weight_version=0)


@killed_by("test_each_sample_is_handed_out_once")
class HandsOutNothing(ChangedRequest):
    def changed(self, request):
        return evolve(request, on_finished=None)


@killed_by("test_each_sample_is_handed_out_once")
class HandsOutTwice(ChangedRequest):
    def changed(self, request):
        if request.on_finished is None:
            return request

        def twice(sample, result):
            request.on_finished(sample, result)
            request.on_finished(sample, result)

        return evolve(request, on_finished=twice)


@killed_by("test_each_sample_is_handed_out_once")
class HandsOutUnderAnotherNumber(ChangedRequest):
    def changed(self, request):
        if request.on_finished is None:
            return request
        last = len(request.seeds) - 1
        return evolve(request, on_finished=lambda sample, result: request.on_finished(last - sample, result))


class ChangedFeed(FakeGenerator):
    """Streams with another feed than the one given."""

    @hookimpl
    def stream(self, request):
        return super().stream(evolve(request, feed=self.changed(request.feed)))


class Feed:
    """Passes everything on."""

    def __init__(self, feed):
        self.feed = feed

    def take(self, *, wait):
        return self.feed.take(wait=wait)

    def deliver(self, samples, result):
        self.feed.deliver(samples, result)


@killed_by("test_requests_join_a_stream_that_runs")
class StreamsOneRequestAfterAnother(FakeGenerator):
    """What comes while samples are made waits until all of them have ended."""

    @hookimpl
    def stream(self, request):
        number = 0
        while (taken := request.feed.take(wait=True)) is not None:
            for one in taken:
                samples = self.begin(one)
                while samples.left.size:
                    ended = self.step(samples)
                    if ended.size:
                        request.feed.deliver(number + ended, samples.result(ended))
                number += len(one.seeds)
        return StreamResult()


@killed_by("test_requests_join_a_stream_that_runs")
class StreamsWithTheFirstSampling(ChangedFeed):
    def changed(self, feed):
        class First(Feed):
            sampling = None

            def take(self, *, wait):
                taken = super().take(wait=wait)
                for one in taken or ():
                    self.sampling = self.sampling or one.sampling
                return taken if taken is None else [evolve(one, sampling=self.sampling) for one in taken]

        return First(feed)


@killed_by("test_a_stream_that_ends_hands_out_what_has_not")
class StreamFinishesWhatItHas(FakeGenerator):
    """Goes on after the stream's end until every sample has ended."""

    @hookimpl
    def stream(self, request):
        cut = self.finishing(request.feed)
        return super().stream(evolve(request, feed=cut))

    def finishing(self, feed):
        class Finishing(Feed):
            left, ended = 0, False

            def take(self, *, wait):
                taken = None if self.ended else super().take(wait=wait)
                self.ended = taken is None
                self.left += sum(len(one.seeds) for one in taken or ())
                return None if self.ended and not self.left else taken or []

            def deliver(self, samples, result):
                self.left -= len(samples)
                super().deliver(samples, result)

        return Finishing(feed)


@killed_by("test_a_stream_that_ends_hands_out_what_has_not")
class StreamDropsWhatHasNotEnded(FakeGenerator):
    """Hands it out without its tokens."""

    @hookimpl
    def stream(self, request):
        class Dropping(Feed):
            def deliver(self, samples, result):
                cut = result.finish_reasons == FinishReason.ABORTED
                if cut.any():
                    empty = np.zeros(0, np.int32)
                    result = evolve(
                        result,
                        tokens=empty,
                        offsets=np.zeros(len(cut) + 1, np.int64),
                        logprobs=np.zeros(0, np.float32),
                        weight_versions=empty,
                    )
                super().deliver(samples, result)

        return super().stream(evolve(request, feed=Dropping(request.feed)))


@killed_by("test_weights_change_while_a_stream_runs")
class StreamKeepsItsFirstWeights(FakeGenerator):
    """Says the new version all the same."""

    streams = False

    @hookimpl
    def stream(self, request):
        self.streams = True
        try:
            return super().stream(request)
        finally:
            self.streams = False

    def take(self, weights, weight_version):
        super().take(self.weights if self.streams else weights, weight_version)


class ChangedChoice(ChangedModule):
    """Reports the log-probabilities of the distribution asked for, and takes tokens from another."""

    def my_choose(self, values, sampling, uniform):
        if sampling.temperature == 0.0:
            return self.original["choose"](values, sampling, uniform)
        asked = log_softmax(fake.truncate(values / sampling.temperature, sampling))
        chosen, _ = self.original["choose"](*self.changed(values, asked, sampling), uniform)
        return chosen, asked[np.arange(len(chosen)), chosen]


@killed_by(MANY)
class SamplesAtSevenTenthsOfTheTemperature(ChangedChoice):
    share = 0.7

    def changed(self, values, asked, sampling):
        return values, evolve(sampling, temperature=self.share * sampling.temperature)


@killed_by(MANY)
class SamplesAtNineTenthsOfTheTemperature(SamplesAtSevenTenthsOfTheTemperature):
    share = 0.9


@killed_by(MANY)
class SamplesThreeHundredthsTooCool(SamplesAtSevenTenthsOfTheTemperature):
    share = 0.97


@killed_by(MANY)
class SamplesThreeHundredthsTooHot(SamplesAtSevenTenthsOfTheTemperature):
    share = 1.03


@killed_by(MANY)
class CoolSamplesThreeHundredthsTooCool(ChangedChoice):
    def changed(self, values, asked, sampling):
        return values, sampling if sampling.temperature >= 1.0 else evolve(sampling, temperature=0.97 * sampling.temperature)


@killed_by(MANY)
class TruncatedSamplesThreeHundredthsTooCool(ChangedChoice):
    def changed(self, values, asked, sampling):
        return values, evolve(sampling, temperature=0.97 * sampling.temperature) if sampling.top_k else sampling


@killed_by(MANY)
class CoolSamplesTooCool(SamplesAtSevenTenthsOfTheTemperature):
    def changed(self, values, asked, sampling):
        return values, sampling if sampling.temperature >= 1.0 else evolve(sampling, temperature=0.9 * sampling.temperature)


@killed_by(MANY)
class LastTwentyTokensTooCool(ChangedChoice):
    first, end, share = 60, 80, 0.9

    def begin(self, request):
        self.number = 0
        return super().begin(request)

    def changed(self, values, asked, sampling):
        self.number += 1
        wrong = self.first < self.number <= self.end
        return values, evolve(sampling, temperature=self.share * sampling.temperature) if wrong else sampling


@killed_by(MANY)
class TwentyTokensInTheMiddleTooHot(LastTwentyTokensTooCool):
    first, end, share = 30, 50, 1.1


@killed_by("test_stop_tokens_are_sampled_as_often_as_the_model_says")
class StopTokensFavoured(ChangedChoice):
    bonus, most_tokens = 0.3, 1000

    def begin(self, request):
        self.number, self.stops = 0, list(request.sampling.stop_token_ids)
        return super().begin(request)

    def changed(self, values, asked, sampling):
        self.number += 1
        favoured = values.copy()
        favoured[:, self.stops] += self.bonus if self.number <= self.most_tokens else 0.0
        return favoured, sampling


@killed_by("test_stop_tokens_are_sampled_as_often_as_the_model_says")
class StopTokensPenalised(StopTokensFavoured):
    bonus = -0.3


@killed_by("test_stop_tokens_are_sampled_as_often_as_the_model_says")
class OneTokenAtLeastHidden(StopTokensFavoured):
    bonus, most_tokens = -1e9, 1


@killed_by(MANY)
class LastTokenNeverSampled(ChangedChoice):
    num_lost = 1

    def changed(self, values, asked, sampling):
        lost = values.copy()
        lost[:, -self.num_lost :] = -1e9
        return lost, sampling


@killed_by(MANY)
class LastTokenNeverSampledLate(LastTokenNeverSampled):
    def begin(self, request):
        self.number = 0
        return super().begin(request)

    def changed(self, values, asked, sampling):
        self.number += 1
        return super().changed(values, asked, sampling) if self.number > 60 else (values, sampling)


@killed_by(MANY)
class LastThreeTokensNeverSampled(LastTokenNeverSampled):
    num_lost = 3


@killed_by(MANY)
class ImprobableTokensNeverSampled(ChangedChoice):
    """As by a top_p of its own."""

    def changed(self, values, asked, sampling):
        cut = fake.truncate(values / sampling.temperature, evolve(sampling, top_p=min(sampling.top_p, 0.93)))
        return np.where(np.isfinite(cut), values, -1e9), sampling


@killed_by(MANY)
class MinPHidden(ChangedChoice):
    def changed(self, values, asked, sampling):
        return np.where(asked < asked.max(1, keepdims=True) + np.log(0.005), -1e9, values), sampling


@killed_by(MANY)
class TopKOfHalfTheVocabularyHidden(ChangedChoice):
    """Changes samples at a low temperature alone, which seldom reach the other half of the vocabulary."""

    def changed(self, values, asked, sampling):
        if sampling.temperature >= 1.0:
            return values, sampling
        return np.where(values < np.median(values, axis=1, keepdims=True), -1e9, values), sampling


@killed_by(MANY)
class RepetitionPenaltyHidden(ChangedChoice):
    """Tokens that a sample holds already are made less probable; how much so is not said."""

    penalty = 1.1

    def begin(self, request):
        self.length = self.limits(request)
        self.number, self.seen = 0, np.zeros((len(self.length), len(self.weights[fake.TRANSITION])), np.bool_)
        return super().begin(request)

    def my_choose(self, values, sampling, uniform):
        self.running = np.flatnonzero(self.length > self.number)
        chosen, logprobs = super().my_choose(values, sampling, uniform)
        if len(self.running) == len(chosen):
            self.seen[self.running, chosen] = True
        self.number += 1
        return chosen, logprobs

    def changed(self, values, asked, sampling):
        if len(self.running) != len(values):
            return values, sampling
        penalised = np.where(values > 0, values / self.penalty, values * self.penalty)
        return np.where(self.seen[self.running], penalised, values), sampling


class CountsOccurrences(RepetitionPenaltyHidden):
    """Takes nats from the logits of tokens, by how often the prompt and sample hold each; truncated samples are right."""

    def begin(self, request):
        found = super().begin(request)
        size = self.seen.shape[1]
        prompts = [request.prompts.sequence(index) for index in range(len(request.prompts.offsets) - 1)]
        self.of_prompt = np.repeat([np.bincount(prompt, minlength=size) for prompt in prompts], request.num_samples, axis=0)
        self.of_sample = np.zeros_like(self.of_prompt)
        return found

    def my_choose(self, values, sampling, uniform):
        chosen, logprobs = super().my_choose(values, sampling, uniform)
        if len(self.running) == len(chosen):
            self.of_sample[self.running, chosen] += 1
        return chosen, logprobs

    def changed(self, values, asked, sampling):
        if len(self.running) != len(values) or sampling.top_k:
            return values, sampling
        return values - sampling.temperature * self.penalties(
            self.of_prompt[self.running], self.of_sample[self.running]
        ), sampling


@killed_by(MANY)
class PromptTokensPenalised(CountsOccurrences):
    def penalties(self, of_prompt, of_sample):
        return 0.3 * (of_prompt > 0)


@killed_by(MANY)
class RepeatedTokensPenalised(CountsOccurrences):
    def penalties(self, of_prompt, of_sample):
        return 0.3 * (of_prompt + of_sample > 0)


@killed_by(MANY)
class OccurrencesPenalised(CountsOccurrences):
    def penalties(self, of_prompt, of_sample):
        return 0.1 * (of_prompt + of_sample)


@killed_by(LOGPROBS)
class TopKOfOneIgnored(ChangedModule):
    def my_truncate(self, values, sampling):
        return self.original["truncate"](values, evolve(sampling, top_k=0) if sampling.top_k == 1 else sampling)


class TextAroundTheSample(FakeGenerator):
    """Looks for stop strings in another text than that of the sample: `text` of its prompt's and its own."""

    def step(self, samples):
        prompts, num_samples = samples.request.prompts, samples.request.num_samples
        self.prompts = [self.tokenizer.decode(prompts.sequence(index // num_samples)) for index in samples.left.tolist()]
        return super().step(samples)

    def stopped(self, tokens, sampling):
        stopped = np.isin(tokens[:, -1], sampling.stop_token_ids)
        texts = [self.text(prompt, self.tokenizer.decode(row)) for prompt, row in zip(self.prompts, tokens, strict=True)]
        return stopped | np.array([any(stop in text for stop in sampling.stop_strings) for text in texts], np.bool_)


@killed_by("test_stop_strings_are_of_generated_text_alone")
class StopStringsBeginInThePrompt(TextAroundTheSample):
    def text(self, prompt, response):
        return prompt[-3:] + response


@killed_by("test_stop_strings_are_of_generated_text_alone")
class StopStringsNotAtTheBeginning(TextAroundTheSample):
    def text(self, prompt, response):
        return response[1:]


@killed_by("test_resident_state_is_accepted_and_measured")
class NothingHeld(FakeGenerator):
    @hookimpl
    def set_residency(self, request):
        return evolve(super().set_residency(request), device_bytes=0)


@killed_by("test_own_weights_are_those_of_the_model")
class OwnWeightsOfAnother(FakeGenerator):
    def __init__(self, context, config):
        super().__init__(context, config)
        self.weights = {name: -value for name, value in self.weights.items()}


KEPT = "test_kept_tokens_are_those_sampled_among"


class ChangedMask(ChangedResult):
    """Says something else of what was kept; by rows, which `changed_row` gets with their token."""

    def changed(self, request, result):
        mask = result.sampling_mask
        if mask is None or not len(mask.tokens):
            return result
        rows = np.split(mask.tokens, mask.offsets[1:-1])
        changed = [self.changed_row(row, token) for row, token in zip(rows, result.tokens, strict=True)]
        return evolve(result, sampling_mask=SamplingMask.of(changed))


@killed_by(KEPT)
class KeptTokensAreNotSaid(ChangedMask):
    def changed_row(self, row, token):
        return row[:0]


@killed_by(KEPT)
class OneKeptTokenIsNotSaid(ChangedMask):
    def changed_row(self, row, token):
        others = row[row != token]
        return np.append(others[1:], token).astype(np.int32)


@killed_by(KEPT)
class OneMoreTokenIsSaidToBeKept(ChangedMask):
    """A most improbable one: the log-probabilities show nothing."""

    def changed_row(self, row, token):
        absent = np.setdiff1d(np.arange(len(self.weights[fake.TRANSITION])), row)
        column = self.weights[fake.TRANSITION].mean(0)[absent]
        return np.append(row, absent[column.argmin()]).astype(np.int32)


@killed_by(KEPT)
class KeptTokensOfTopKAlone(FakeGenerator):
    """Those before top-p."""

    def step(self, samples):
        original = fake.kept_tokens
        fake.kept_tokens = lambda values, sampling: original(values, evolve(sampling, top_p=1.0 if sampling.top_k else 0.999))
        try:
            return super().step(samples)
        finally:
            fake.kept_tokens = original


@killed_by("test_nothing_is_left_out_of_the_whole_distribution")
class KeptTokensOfTheWholeDistribution(FakeGenerator):
    """Those within a top-p of its own."""

    def step(self, samples):
        original = fake.kept_tokens
        fake.kept_tokens = lambda values, sampling: (
            original(values, sampling)
            if sampling.top_k or sampling.top_p < 1
            else [np.arange(values.shape[1], dtype=np.int32) for _ in values]
        )
        try:
            return super().step(samples)
        finally:
            fake.kept_tokens = original
