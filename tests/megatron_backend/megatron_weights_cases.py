"""What each rank does to show that weights survive a layout: CASES is the table, and one launch runs all rows of a size."""

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import field, frozen
from fsdp2_support import ALPHABET
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron_families import FAMILIES, FIXED, WITH_EXPERTS, make_own
from rank_launch import run_rows
from safetensors.torch import load_file
from torch import Tensor

from rlcore.spi import ExportWeightsRequest, ModelSpec, RankInfo, ShardSlice, tensor_digest
from rlcore_megatron.checkpoints import conversion
from rlcore_megatron.checkpoints.cache_directory import OWN
from rlcore_megatron.checkpoints.initial import load_initial
from rlcore_megatron.families.models import load_config
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.layouts import parallel
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.model import build
from rlcore_megatron.modules.model_config import transformer_config
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_megatron.weights import load
from rlcore_megatron.weights.export import Exporter
from rlcore_megatron.weights.shards import reader
from rlcore_torchkit.huggingface.safetensors_files import TensorFiles
from rlcore_torchkit.refit.shard_plan import plan_pieces
from rlcore_torchkit.refit.shard_route import whole_slice
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model

MODELS: Mapping[str, tuple[str, bool]] = {
    "qwen2": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "llama": ("llama", True),
    "qwen3_moe": ("qwen3_moe", False),
    "one_key_head": ("qwen2", True),
}
"""Architecture and whether its embeddings are tied."""
DENSE = ("qwen2", "qwen3", "llama")
ONE_KEY_HEAD = ("one_key_head",)
"""Of which every tensor rank takes a part."""
IMAGES = ("qwen2_5_vl", "qwen3_vl")
"""Of images: files that have the language model at their top, and files that have it beside the vision tower."""
BUCKET_BYTES = (1, 1 << 13, 1 << 30)


@frozen(kw_only=True)
class Case:
    """A row of the table."""

    name: str
    sizes: Mapping[str, int] = field(factory=dict)
    """Of ParallelLayout; data parallel from the rest."""
    models: tuple[str, ...] = (*DENSE, "qwen3_moe", *FAMILIES, *IMAGES)

    def layout(self, rank: int, num_ranks: int) -> ParallelLayout:
        of_others = self.sizes.get("tensor", 1) * self.sizes.get("context", 1) * self.sizes.get("pipeline", 1)
        return ParallelLayout(rank=rank, data=num_ranks // of_others, **self.sizes)


MOE = ("qwen3_moe", *WITH_EXPERTS)
DENSE_OWN = tuple(name for name in FAMILIES if name not in WITH_EXPERTS)
DIVIDED = tuple(name for name in MOE if name != "gpt_oss")
"""Whose experts several ranks may share."""
CASES: Mapping[int, tuple[Case, ...]] = {
    2: (
        Case(name="dp2"),
        Case(name="tp2", sizes={"tensor": 2}, models=(*MODELS, *DENSE_OWN, *IMAGES)),
        Case(name="pp2", sizes={"pipeline": 2}),
        Case(
            name="pp2xvpp2",
            sizes={"pipeline": 2, "virtual_pipeline": 2},
            models=(*DENSE, "qwen3_moe", *FAMILIES, "qwen2_5_vl"),
        ),
        Case(name="cp2", sizes={"context": 2}, models=("qwen3",)),
        Case(name="ep2", sizes={"expert": 2}, models=MOE),
        Case(name="etp2", sizes={"expert_tensor": 2}, models=DIVIDED),
        Case(name="tp2xep2", sizes={"tensor": 2, "expert": 2}, models=MOE),
        Case(name="tp2xetp2", sizes={"tensor": 2, "expert_tensor": 2}, models=DIVIDED),
    ),
    4: (
        Case(name="tp2xpp2", sizes={"tensor": 2, "pipeline": 2}),
        Case(name="ep2xdp2", sizes={"expert": 2}, models=MOE),
        Case(name="pp2xvpp2xep2", sizes={"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, models=MOE),
        Case(name="tp2xep2xetp2", sizes={"tensor": 2, "expert": 2, "expert_tensor": 2}, models=DIVIDED),
        Case(name="tp2xpp2xep2", sizes={"tensor": 2, "pipeline": 2, "expert": 2}, models=MOE),
        Case(name="tp4", sizes={"tensor": 4}, models=("qwen2", "qwen3", "qwen3_moe", *ONE_KEY_HEAD)),
        Case(name="pp2xetp2", sizes={"pipeline": 2, "expert_tensor": 2}, models=DIVIDED),
    ),
}


def prepare(root: Path) -> None:
    for name, (architecture, tied) in MODELS.items():
        key_heads = 1 if name == ONE_KEY_HEAD[0] else 2
        sizes = {"num_layers": 5, "hidden_size": 16, "num_heads": 4, "num_kv_heads": key_heads}
        make_model(root / name, architecture, tied=tied, alphabet=ALPHABET, **sizes)
    for name in FAMILIES:
        make_own(root / name, name, num_hidden_layers=5, hidden_size=16)
    for name in IMAGES:
        make_image_model(root / name, name, num_layers=5, tied=name == "qwen3_vl")


@frozen(kw_only=True, eq=False)
class Opened:
    """A model in a layout, its weights not set."""

    parts: Sequence[Any]
    hf: Any
    spec: ModelSpec
    layout: ParallelLayout
    groups: parallel.Groups

    def load(self) -> None:
        load.load_hf(self.parts, self.hf, self.spec, self.layout)

    def exported(self, **options: Any) -> dict[str, Tensor]:
        """All tensors, once what the export says of them is found to be true."""
        return exported(self.exporter(), **options)

    def exporter(self) -> Exporter:
        return Exporter(self.parts, Names.of(self.hf), self.layout, self.groups)


@contextmanager
def opened(directory: Path, layout: ParallelLayout, dtype: str = "float32", vocabulary: int | None = None) -> Iterator[Opened]:
    spec, device = ModelSpec(path=str(directory), dtype=dtype), "cuda" if torch.cuda.is_available() else "cpu"
    rank_info = RankInfo(rank=layout.rank, world_size=layout.world_size, local_rank=layout.rank, device=device)
    hf = load_config(spec)
    if vocabulary is not None:
        hf.vocab_size = vocabulary
    with cuda_or_cpu():
        parallel.join(rank_info, layout, 60.0)
        try:
            config = transformer_config(hf, MegatronConfig(), layout, dtype, device)
            parts = build(config, hf, layout)
            for part in parts:
                for parameter in part.parameters():
                    parameter.data.fill_(torch.nan)
            yield Opened(parts=parts, hf=hf, spec=spec, layout=layout, groups=parallel.Groups.current())
        finally:
            parallel.leave()


def exported(exporter: Exporter, max_bucket_bytes: int = 1 << 13, dtype: str = "float32") -> dict[str, Tensor]:
    request = ExportWeightsRequest(weight_version=3, dtype=dtype, max_bucket_bytes=max_bucket_bytes)
    export = exporter.export(request)
    assert export.weight_version == 3
    found: dict[str, Tensor] = {}
    for bucket in export.buckets:
        assert len(bucket.tensors) == 1 or sum(named.tensor.nbytes for named in bucket.tensors) <= max_bucket_bytes
        for named in bucket.tensors:
            assert named.name not in found
            found[named.name] = named.tensor.to("cpu", copy=True)
            assert named.digest == tensor_digest(found[named.name].view(torch.uint8).numpy()), named.name
    assert [(spec.name, spec.shape) for spec in export.specs] == [(name, tuple(found[name].shape)) for name in found]
    assert all(spec.dtype == ("float32" if spec.keeps_dtype else dtype) for spec in export.specs)
    assert [spec.name for spec in export.specs if spec.keeps_dtype] == [name for name in found if name.endswith(FIXED)]
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, different


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In bfloat16, but for what has a dtype of its own."""
    return {name: tensor if name.endswith(FIXED) else tensor.bfloat16() for name, tensor in tensors.items()}


def in_files(directory: Path) -> dict[str, Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"} if is_tied(directory) else tensors


def is_tied(directory: Path) -> bool:
    return bool(json.loads((directory / "config.json").read_text())["tie_word_embeddings"])


def round_trip(directory: Path, layout: ParallelLayout) -> None:
    expected = in_files(directory)
    with opened(directory, layout) as model:
        model.load()
        orders = set()
        for size in BUCKET_BYTES:
            found = model.exported(max_bucket_bytes=size)
            assert_equal(found, expected)
            orders.add(tuple(found))
        assert len(orders) == 1
        assert_equal(model.exported(dtype="bfloat16"), rounded(expected))
        assert_equal(put_together(model), expected)
        if not torch.cuda.is_available():
            assert_equal(queued(model), expected)
    with opened(directory, layout, "bfloat16") as model:
        model.load()
        assert_equal(model.exported(), {name: tensor.float() for name, tensor in rounded(expected).items()})


def put_together(model: Opened) -> dict[str, Tensor]:
    """All tensors by the parts that ranks hold, which are the same or have nothing in common, as a plan of shards wants it."""
    exporter = model.exporter()
    specs, parts = exporter.specs("float32"), exporter.parts()
    read = reader(parts)
    mine = {box: part.cpu().clone() for spec in specs for box, part in read([spec]).items()}
    assert mine.keys() == {part.box for part in parts}
    everyones: list[dict[ShardSlice, Tensor]] = [{}] * model.layout.world_size
    dist.all_gather_object(everyones, mine)
    plan_pieces(specs, [list(held) for held in everyones], [[whole_slice(spec) for spec in specs]], 1 << 30)
    found = {spec.name: torch.full(spec.shape, torch.nan) for spec in specs}
    for box, part in (pair for held in everyones for pair in held.items()):
        place = found[box.name][tuple(map(slice, box.start, box.stop))]
        assert torch.equal(place, part) or bool(place.isnan().all()), box
        place.copy_(part)
    return found


def check_reads(directory: Path, layouts: Sequence[ParallelLayout]) -> None:
    """What is read of the files is as large as the parameters that are filled."""
    for layout in layouts:
        with opened(directory, layout) as model:
            with reading() as num_read:
                model.load()
            parameters = [parameter for part in model.parts for parameter in part.parameters()]
            num_parameters = sum(parameter.numel() for parameter in parameters)
            mine = [one.numel() for one in parameters if dist.get_rank(parallel.holders_of(one)) == 0]
            assert sum(num_read) == sum(mine)
            assert num_parameters < 0.7 * sum(tensor.numel() for tensor in in_files(directory).values())


def check_reads_of_copies(directory: Path, layouts: Sequence[ParallelLayout]) -> None:
    """Data-parallel ranks together read each element of the files once."""
    for layout in layouts:
        with opened(directory, layout) as model:
            with reading() as num_read:
                model.load()
            together = torch.tensor([sum(num_read)])
            dist.all_reduce(together)
            assert int(together) == sum(tensor.numel() for tensor in in_files(directory).values())
            assert not any(parameter.isnan().any() for part in model.parts for parameter in part.parameters())


def check_reads_of_a_conversion(directory: Path, layouts: Sequence[ParallelLayout]) -> None:
    """Ranks that hold the same weights together read each element of Megatron's format once, whatever layout wrote it."""
    for layout in layouts:
        with opened(directory, layout, "bfloat16") as model:
            with mock.patch.object(MCoreLoadPlanner, "commit_tensor", autospec=True) as taken:
                conversion.load(model.parts, model.hf, model.spec, layout)
            together = torch.tensor([sum(call.args[1].lengths.numel() for call in taken.call_args_list)])
            dist.all_reduce(together)
            assert int(together) == sum(tensor.numel() for tensor in in_files(directory).values())


@contextmanager
def reading() -> Iterator[list[int]]:
    """How many elements each slice has that is read of any file."""
    found: list[int] = []

    read = TensorFiles.read

    def counted(files: TensorFiles, name: str, bounds: Sequence[slice], dtype: torch.dtype) -> Tensor:
        result = read(files, name, bounds, dtype)
        found.append(result.numel())
        return result

    with mock.patch.object(TensorFiles, "read", counted):
        yield found


def check_conversion(directory: Path, layouts: Sequence[ParallelLayout]) -> None:
    """The first layout makes the copy, all others read it; none of the others reads the model."""
    expected = {name: tensor.float() for name, tensor in rounded(in_files(directory)).items()}
    for number, layout in enumerate(layouts):
        with (
            opened(directory, layout, "bfloat16") as model,
            mock.patch.object(conversion, "load_hf", wraps=load.load_hf) as read,
        ):
            conversion.load(model.parts, model.hf, model.spec, layout)
            assert read.call_count == (number == 0)
            assert_equal(model.exported(), expected)
            assert conversion.copy_directory(model.spec).exists()


def check_conversion_by_a_slow_rank(directory: Path, layouts: Sequence[ParallelLayout]) -> None:
    """The first rank gives the copy its name only once every one has seen what it has written."""
    rank, glob, seen = dist.get_rank(), Path.glob, set[str]()

    def slowly(path: Path, pattern: str) -> Iterator[Path]:
        time.sleep(0.3 * rank)
        found = list(glob(path, pattern))
        seen.update(each.name for each in found)
        return iter(found)

    with mock.patch.object(Path, "glob", slowly):
        check_conversion(directory, layouts)
    assert any(name.startswith(f"__{rank}_") for name in seen)


def check_megatron_checkpoint(directory: Path, folder: Path, layouts: Sequence[ParallelLayout]) -> None:
    """Megatron's own function writes in the first layout, with all layers in one tensor; the others read that."""
    with opened(directory, layouts[0]) as model:
        model.load()
        write_as_megatron(folder, model)
    for layout in layouts[1:]:
        assert_equal(from_checkpoint(directory, folder, layout), in_files(directory))


def check_longer_vocabulary(directory: Path, folder: Path, layouts: Sequence[ParallelLayout]) -> None:
    """As Megatron-LM makes it; of two ranks that hold the same weights."""
    with opened(directory, layouts[0], vocabulary=128) as model:
        for number, parameter in enumerate(model.parts[0].parameters()):
            parameter.data.normal_(generator=torch.Generator(parameter.device).manual_seed(number))
        write_as_megatron(folder, model)
        expected = model.exported()
    for name in expected.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        expected[name] = expected[name][: len(in_files(directory)[name])]
    for layout in layouts[1:]:
        assert_equal(from_checkpoint(directory, folder, layout), expected)


WRITES = (check_megatron_checkpoint, check_longer_vocabulary)
"""Checks that write into a folder of their own."""


def from_checkpoint(directory: Path, folder: Path, layout: ParallelLayout) -> dict[str, Tensor]:
    with opened(directory, layout) as model:
        load_initial(model.parts, model.hf, model.spec, MegatronConfig(pretrained_checkpoint=str(folder)), layout)
        return model.exported()


def write_as_megatron(folder: Path, model: Opened, prefix: str = "") -> None:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    keys = ["model"] if len(model.parts) == 1 else [f"model{number}" for number in range(len(model.parts))]
    state = {key: part.sharded_state_dict(prefix=prefix) for key, part in zip(keys, model.parts, strict=True)}
    dist_checkpointing.save({**state, "iteration": 5, "args": Namespace(lr=0.1)}, str(folder))


def queued(model: Opened) -> dict[str, Tensor]:
    """As on a GPU, where all collectives of a bucket are queued at once on a stream of their own."""
    exporter = Exporter(model.parts, Names.of(model.hf), model.layout, model.groups)
    exporter.stream = mock.MagicMock()
    found = exported(exporter)
    assert exporter.stream.record_event.call_count > 1
    return found


def rows(num_ranks: int) -> dict[str, Callable[[Path, int], None]]:
    """What runs on that many ranks, by name."""
    found: dict[str, Callable[[Path, int], None]] = {}
    cases = {case.name: case for case in CASES[num_ranks]}
    for case in CASES[num_ranks]:
        for model in case.models:

            def run(root: Path, rank: int, case: Case = case, model: str = model) -> None:
                round_trip(root / model, case.layout(rank, num_ranks))

            found[f"{case.name}/{model}"] = run

    def on(function: Callable[..., None], model: str, *names: str) -> Callable[[Path, int], None]:
        def run(root: Path, rank: int) -> None:
            folder = (root / f"{function.__name__}-{model}",) if function in WRITES else ()
            function(root / model, *folder, [cases[name].layout(rank, num_ranks) for name in names])

        return run

    if num_ranks == 2:
        found |= {
            "reads/llama": on(check_reads, "llama", "tp2", "pp2", "pp2xvpp2"),
            "reads of copies/qwen2": on(check_reads_of_copies, "qwen2", "dp2"),
            "reads of copies/qwen3_moe": on(check_reads_of_copies, "qwen3_moe", "dp2"),
            "reads/qwen3_moe": on(check_reads, "qwen3_moe", "tp2xep2"),
            "converted/qwen2": on(check_conversion, "qwen2", "tp2", "pp2", "pp2xvpp2", "dp2"),
            "converted by a slow rank/llama": on(check_conversion_by_a_slow_rank, "llama", "tp2"),
            "converted/qwen3_moe": on(check_conversion, "qwen3_moe", "tp2xep2", "tp2xetp2", "pp2xvpp2"),
            "reads of a conversion/qwen2": on(check_reads_of_a_conversion, "qwen2", "dp2"),
            "reads of a conversion/qwen3_moe": on(check_reads_of_a_conversion, "qwen3_moe", "dp2"),
            **{f"converted/{name}": on(check_conversion, name, "tp2xep2", "pp2xvpp2") for name in WITH_EXPERTS},
            **{f"converted/{name}": on(check_conversion, name, "tp2", "pp2xvpp2") for name in DENSE_OWN},
            **{f"converted/{name}": on(check_conversion, name, "tp2", "pp2", "dp2") for name in IMAGES},
            "megatron/qwen3_moe": on(check_megatron_checkpoint, "qwen3_moe", "tp2xep2", "tp2xetp2", "pp2xvpp2"),
            "converted/one_key_head": on(check_conversion, "one_key_head", "tp2", "dp2", "pp2"),
            "megatron/one_key_head": on(check_megatron_checkpoint, "one_key_head", "tp2", "dp2", "pp2"),
            "megatron/qwen2": on(check_longer_vocabulary, "qwen2", "dp2", "tp2", "pp2xvpp2"),
        }
    return found


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    """Run the rows of these names."""
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    os.environ[OWN] = str(root / f"converted-{num_ranks}")
    dist.init_process_group(backend, init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    every = {name: row for name, row in rows(num_ranks).items() if name in names}
    run_rows({name: partial(run, root, rank) for name, run in every.items()}, root / f"results-{num_ranks}-{rank}.json")
    dist.destroy_process_group()
