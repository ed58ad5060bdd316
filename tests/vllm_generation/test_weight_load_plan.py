"""Copies that are made again without a model's loaders leave what the loaders would."""

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch import nn

from rlcore.spi import ShardSlice, TensorSpec
from rlcore_vllm.ranks.weight_load_plan import Copy, WeightLoadPlan

HIDDEN, HEADS, KV, INNER, EXPERTS, VOCABULARY, PADDED = 8, 8, 4, 6, 4, 11, 16


class Model(nn.Module):
    """Parameters that hold several tensors each, or this rank's half of one, as vLLM's do, and loaders like its own."""

    def __init__(self):
        super().__init__()
        self.qkv = self.made(HEADS // 2 + KV, HIDDEN)
        self.down = self.made(HIDDEN, INNER // 2)
        self.turned = self.made(HIDDEN, HIDDEN)
        self.embedding = self.made(PADDED, HIDDEN)
        self.w13 = self.made(EXPERTS, 2 * INNER, HIDDEN)
        self.w2 = self.made(EXPERTS, HIDDEN, INNER)
        self.decay = self.made(HIDDEN)
        self.scale = self.made(HIDDEN)
        self.norm = self.made(HIDDEN, dtype=torch.float32)
        self.called = []

    def made(self, *shape, dtype=torch.bfloat16):
        return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            self.called.append(name)
            if parameter := self.load(name, tensor):
                loaded.add(parameter)
        return loaded

    def load(self, name, tensor):
        match name.split("."):
            case ["q"]:
                self.qkv.data[: HEADS // 2].copy_(tensor.narrow(0, HEADS // 2, HEADS // 2))
                return "qkv"
            case ["kv"]:
                first, second = tensor.chunk(2)
                self.qkv.data[HEADS // 2 :][: KV // 2].copy_(first)
                self.qkv.data[HEADS // 2 :][KV // 2 :].copy_(second)
                return "qkv"
            case ["down"]:
                self.down.data.copy_(tensor.narrow(1, INNER // 2, INNER // 2))
            case ["turned"]:
                self.turned.data.copy_(tensor.T)
            case ["embedding"]:
                self.embedding.data[:VOCABULARY].copy_(tensor)
                self.embedding.data[VOCABULARY:].fill_(0)
            case ["experts", number, "gate"]:
                self.w13.data[int(number)][:INNER].copy_(tensor)
                return "w13"
            case ["experts", number, "up"]:
                self.w13.data[int(number)][INNER:].copy_(tensor)
                return "w13"
            case ["experts", number, "down"]:
                self.w2.data[int(number)].copy_(tensor)
                return "w2"
            case ["decay"]:
                self.decay.data.copy_(-torch.exp(tensor.float()))
            case ["scale"]:
                tensor.mul_(2.0)
                self.scale.data.copy_(tensor)
            case ["norm"]:
                self.norm.data.copy_(tensor)
            case ["elsewhere"]:
                return None
        return name


SHAPES = {
    "q": (HEADS, HIDDEN),
    "kv": (KV, HIDDEN),
    "down": (HIDDEN, INNER),
    "turned": (HIDDEN, HIDDEN),
    "embedding": (VOCABULARY, HIDDEN),
    "decay": (HIDDEN,),
    "scale": (HIDDEN,),
    "norm": (HIDDEN,),
    "elsewhere": (3, 2),
} | {
    f"experts.{number}.{part}": (HIDDEN, INNER) if part == "down" else (INNER, HIDDEN)
    for number in range(EXPERTS)
    for part in ("gate", "up", "down")
}
CHANGED = {"decay", "scale", "embedding"}
"""Tensors that loaders do more with than to copy them, or to whose parameters they write more than tensors' parts."""


def packed(seed):
    """Random tensors, side by side in one buffer, as they arrive."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).bfloat16()
    return [(name, part.view(shape)) for (name, shape), part in zip(SHAPES.items(), buffer.split(sizes), strict=True)]


def load(model, copies, weights):
    """The names of parameters that got something."""
    return copies.load(weights, model.load_weights)


def loaded_model(seed):
    model = Model()
    model.load_weights(packed(seed))
    return model


def assert_alike(model, expected):
    held, wanted = dict(model.named_parameters()), dict(expected.named_parameters())
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.fixture
def noted():
    """A model that was loaded once, and what was noted."""
    model = Model()
    copies = WeightLoadPlan(model)
    copies.begin()
    load(model, copies, packed(0))
    model.called.clear()
    return model, copies


def test_the_first_load_is_the_loaders(noted):
    assert_alike(noted[0], loaded_model(0))


@pytest.mark.parametrize("cut", [1, 3, 20])
def test_later_loads_leave_what_the_loaders_would(noted, cut):
    """In buckets that are cut elsewhere."""
    model, copies = noted
    weights = packed(1)
    copies.begin()
    names = set().union(*(load(model, copies, weights[at : at + cut]) for at in range(0, len(weights), cut)))
    assert_alike(model, loaded_model(1))
    assert set(model.called) == CHANGED
    assert names == {name for name, _ in model.named_parameters()}


@pytest.fixture
def planned(noted):
    """A model that was loaded twice since, in buckets that were cut alike; what was done with each is kept."""
    model, copies = noted
    for seed in (1, 2):
        load_in_buckets(copies, model, packed(seed), 4)
    model.called.clear()
    return model, copies


def load_in_buckets(copies, model, weights, cut):
    copies.begin()
    return set().union(*(load(model, copies, weights[at : at + cut]) for at in range(0, len(weights), cut)))


def reordered(weights):
    """The same in each bucket of four, in another order."""
    return [pair for at in range(0, len(weights), 4) for pair in reversed(weights[at : at + 4])]


@pytest.mark.parametrize("change", [list, reordered, lambda weights: list(reversed(weights)), lambda weights: weights[1:]])
@pytest.mark.parametrize("cut", [3, 4, 20])
def test_other_cuts_and_orders_than_before_leave_what_the_loaders_would(planned, cut, change):
    model, copies = planned
    expected = loaded_model(2)
    expected.load_weights(change(packed(3)))
    load_in_buckets(copies, model, change(packed(3)), cut)
    assert_alike(model, expected)
    assert set(model.called) == CHANGED


def test_all_parameters_are_reported_each_time(planned):
    model, copies = planned
    for seed in (3, 4):
        assert load_in_buckets(copies, model, packed(seed), 4) == {name for name, _ in model.named_parameters()}
        assert_alike(model, loaded_model(seed))


def test_a_parameter_that_moved_after_several_loads_is_loaded_where_it_is(planned):
    model, copies = planned
    model.w2.data = torch.zeros_like(model.w2)
    for seed in (3, 4):
        load_in_buckets(copies, model, packed(seed), 4)
        assert_alike(model, loaded_model(seed))


CHANGES = {
    "dtype": lambda tensor: tensor.float(),
    "layout": lambda tensor: tensor.T.contiguous().T,
    "shape": lambda tensor: tensor[:1].contiguous(),
}


def bucket_of_experts(change):
    """One of those that `planned` was loaded from, with one tensor changed."""
    weights = packed(3)
    at = list(SHAPES).index("experts.1.up") // 4 * 4
    return [(name, change(tensor) if name == "experts.1.up" else tensor) for name, tensor in weights[at : at + 4]]


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_unlike_those_before_goes_to_its_loader(planned, change):
    model, copies = planned
    copies.begin()
    bucket = bucket_of_experts(CHANGES[change])
    load(model, copies, bucket)
    assert model.called == ["experts.1.up"]
    assert torch.equal(model.w13[1][INNER:], dict(bucket)["experts.1.up"].bfloat16().expand(INNER, HIDDEN))


def test_what_was_noted_last_of_a_tensor_counts(planned):
    model, copies = planned
    for change in (torch.Tensor.float, torch.clone):
        copies.begin()
        load(model, copies, bucket_of_experts(change))
    assert model.called == ["experts.1.up"] * 2


class Reading(Model):
    """Reads a parameter once it is told to."""

    reads = False

    def load(self, name, tensor):
        if name == "decay" and self.reads:
            self.w2.data.sum()
        return super().load(name, tensor)


def test_what_loaders_have_begun_to_read_is_not_copied_without_them():
    model = Reading()
    copies = WeightLoadPlan(model)
    for seed in (0, 1, 2, 3):
        model.called.clear()
        model.reads = seed == 3
        load_in_buckets(copies, model, packed(seed), 4)
    assert set(model.called) == CHANGED | {name for name in SHAPES if name.endswith(".down")}


def test_memory_that_was_discarded_in_between_holds_what_the_loaders_would_leave(noted):
    """Also in rows that fill up a vocabulary, which no tensor brings."""
    model, copies = noted
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    copies.begin()
    load(model, copies, packed(1))
    assert_alike(model, loaded_model(1))


def test_other_shapes_dtypes_and_layouts_go_to_the_loaders(noted):
    _, copies = noted
    weight = dict(packed(1))["down"]
    assert copies.know("down", weight)
    assert not copies.know("down", weight.float())
    assert not copies.know("down", weight[:, :2].contiguous())
    assert not copies.know("down", weight.T.contiguous().T)
    assert not copies.know("unheard of", weight)


SPECS = [TensorSpec(name=name, shape=shape, dtype="bfloat16") for name, shape in SHAPES.items()]
NEEDED = {
    "q": [ShardSlice("q", (HEADS // 2, 0), (HEADS, HIDDEN))],
    "kv": [ShardSlice("kv", (0, 0), (KV, HIDDEN))],
    "down": [ShardSlice("down", (0, INNER // 2), (HIDDEN, INNER))],
    "turned": [ShardSlice("turned", (0, 0), (HIDDEN, HIDDEN))],
    "elsewhere": [],
}


def test_what_is_copied_of_a_tensor_is_needed_and_of_others_all(noted):
    _, copies = noted
    needs = copies.needs(SPECS)
    assert needs.keys() == SHAPES.keys() - CHANGED
    assert {name: needs[name] for name in NEEDED} == NEEDED
    others = [evolve(SPECS[0], shape=(HEADS, HIDDEN + 1)), evolve(SPECS[0], dtype="float32"), evolve(SPECS[0], name="new")]
    assert copies.needs(others) == {}


def test_loads_read_nothing_but_what_is_needed(noted):
    model, copies = noted
    copies.begin()
    needs, weights = copies.needs(SPECS), []
    for name, tensor in packed(1):
        parts = needs.get(name, [ShardSlice(name, (0,) * tensor.ndim, tuple(tensor.shape))])
        weights.append((name, torch.full_like(tensor, float("nan"))))
        for box in parts:
            place = tuple(map(slice, box.start, box.stop))
            weights[-1][1][place] = tensor[place]
    load(model, copies, weights)
    assert_alike(model, loaded_model(1))


SHAPE = (4, 6, 8)


@pytest.mark.parametrize(
    ("cut", "start", "stop"),
    [
        (lambda tensor: tensor, (0, 0, 0), SHAPE),
        (lambda tensor: tensor[1:3, 2:5, 4:], (1, 2, 4), (3, 5, 8)),
        (lambda tensor: tensor[2], (2, 0, 0), (3, 6, 8)),
        (lambda tensor: tensor[:, 3], (0, 3, 0), (4, 4, 8)),
        (lambda tensor: tensor[3, 5, 7], (3, 5, 7), (4, 6, 8)),
        (lambda tensor: tensor[:, :, 2:4].permute(2, 0, 1), (0, 0, 2), (4, 6, 4)),
        (lambda tensor: tensor[1:, ::2], (1, 0, 0), (4, 5, 8)),
        (lambda tensor: tensor.view(2, 2, 6, 8)[1], (2, 0, 0), (4, 6, 8)),
        (lambda tensor: tensor.view(24, 8)[7:9], (1, 1, 0), (2, 3, 8)),
        (lambda tensor: tensor.view(24, 8)[5:7], (0, 0, 0), (2, 6, 8)),
        (lambda tensor: tensor.view(-1)[50:60], (1, 0, 0), (2, 6, 8)),
        (lambda tensor: tensor.view(4, 48)[:, 7:9], (0, 0, 0), (4, 6, 8)),
        (lambda tensor: tensor[1, :1, :1].expand(5, 7), (1, 0, 0), (2, 1, 1)),
    ],
)
def test_a_part_lies_where_its_elements_do(cut, start, stop):
    tensor = torch.arange(4 * 6 * 8).view(SHAPE)
    part = cut(tensor)
    copy = Copy(
        destination=torch.empty(part.shape), stride=part.stride(), offset=part.storage_offset(), is_all=False, is_flat=False
    )
    box = copy.region("w", tensor.shape)
    assert {*part.flatten().tolist()} <= {*tensor[tuple(map(slice, box.start, box.stop))].flatten().tolist()}
    assert box == ShardSlice("w", start, stop)


def test_a_parameter_with_other_memory_is_noted_anew(noted):
    model, copies = noted
    model.w2.data = torch.zeros_like(model.w2)
    copies.begin()
    assert copies.needs(SPECS) == {}
    load(model, copies, packed(2))
    assert_alike(model, loaded_model(2))
    assert set(model.called) == SHAPES.keys()


def test_a_load_that_fails_is_not_noted():
    model = Model()
    copies = WeightLoadPlan(model)
    copies.begin()
    weights = packed(0)
    wrong = [("q", torch.zeros(2, HIDDEN)), *weights[1:]]
    with pytest.raises(IndexError):
        load(model, copies, wrong)
    assert not any(copies.know(name, tensor) for name, tensor in weights)


def test_tensors_that_share_memory_are_not_noted():
    model = Model()
    copies = WeightLoadPlan(model)
    copies.begin()
    same = torch.ones(INNER, HIDDEN, dtype=torch.bfloat16)
    weights = [("experts.0.gate", same), ("experts.0.up", same)]
    load(model, copies, weights)
    assert not any(copies.know(name, tensor) for name, tensor in weights)


@pytest.mark.parametrize(
    "told",
    [
        {"enable_eplb": True},
        {"moe_config": SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=True))},
    ],
)
def test_experts_that_vllm_moves_are_not_noted(told):
    model = Model()
    model.balanced = nn.Module()
    vars(model.balanced).update(told)
    copies = WeightLoadPlan(model)
    copies.begin()
    load(model, copies, packed(0))
    assert not any(copies.know(name, tensor) for name, tensor in packed(0))


class Peeking(Model):
    """Looks at a value, on which a branch may depend."""

    def load(self, name, tensor):
        if name == "norm":
            assert tensor[0].item() != 123.0
        return super().load(name, tensor)


class Doubling(Model):
    """Changes a parameter in place once it is loaded."""

    def load(self, name, tensor):
        loaded = super().load(name, tensor)
        if name == "norm":
            self.norm.data.mul_(2.0)
        return loaded


class Deriving(Model):
    """Makes a parameter from another."""

    def __init__(self):
        super().__init__()
        self.derived = self.made(HIDDEN, dtype=torch.float32)

    def load(self, name, tensor):
        loaded = super().load(name, tensor)
        if name == "norm":
            self.derived.data.copy_(self.norm.data * 2.0)
        return loaded


class Repeating(Deriving):
    """Copies a parameter to another."""

    def load(self, name, tensor):
        loaded = Model.load(self, name, tensor)
        if name == "norm":
            self.derived.data.copy_(self.norm.data)
        return loaded


@pytest.mark.parametrize("kind", [Peeking, Doubling, Deriving, Repeating])
def test_what_a_loader_does_besides_makes_tensors_unknown(kind):
    model = kind()
    copies = WeightLoadPlan(model)
    copies.begin()
    load(model, copies, packed(0))
    assert {name for name, tensor in packed(0) if not copies.know(name, tensor)} == CHANGED | {"norm"}


def test_what_writes_nothing_leaves_tensors_known():
    class Full(Model):
        def load(self, name, tensor):
            loaded = super().load(name, tensor)
            self.norm.data[HIDDEN:].fill_(0)
            return loaded

    model = Full()
    copies = WeightLoadPlan(model)
    copies.begin()
    load(model, copies, packed(0))
    assert {name for name, tensor in packed(0) if not copies.know(name, tensor)} == CHANGED


def test_a_buffer_that_is_replaced_is_loaded():
    class Buffered(Model):
        def __init__(self):
            super().__init__()
            norm = self.norm.data
            del self.norm
            self.register_buffer("norm", norm)

    model = Buffered()
    copies = WeightLoadPlan(model)
    copies.begin()
    load(model, copies, packed(0))
    model.norm = torch.zeros_like(model.norm)
    copies.begin()
    load(model, copies, packed(1))
    assert torch.equal(model.norm, dict(packed(1))["norm"].float())


class Outside(Model):
    """On a rank that has no row of a head, the others of which are beyond the vocabulary."""

    def __init__(self):
        super().__init__()
        self.head = self.made(PADDED, HIDDEN)

    def load(self, name, tensor):
        if name != "elsewhere":
            return super().load(name, tensor)
        self.head.data[:0, :2].copy_(tensor.narrow(0, 3, 0))
        self.head.data[0:].fill_(0)
        return "head"


def test_what_loaders_report_without_a_copy_is_reported_each_time():
    model = Outside()
    copies = WeightLoadPlan(model)
    for seed in (0, 1):
        copies.begin()
        assert load(model, copies, packed(seed)) == {name for name, _ in model.named_parameters()}


def test_loaders_that_report_nothing_go_on_to():
    class Silent(Model):
        def load_weights(self, weights):
            super().load_weights(weights)

    model = Silent()
    copies = WeightLoadPlan(model)
    for seed in (0, 1):
        copies.begin()
        assert load(model, copies, packed(seed)) is None
        assert_alike(model, loaded_model(seed))
    assert load(model, copies, [("q", dict(packed(2))["q"])]) is None
    assert model.called.count("q") == 1
