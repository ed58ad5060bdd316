"""What cannot work on a cluster: one clear message each, before anything is allocated where that is possible."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.run.plan.channel import ranks_per_generator
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import CheckContext, ConfigError, PluginError, RankInfo
from rlcore_ray.config import RayConfig

Prepare = Callable[..., RunPlan]


@pytest.mark.parametrize(
    ("overrides", "path", "found"),
    [
        (["cluster.gpus_per_node=0"], "cluster.gpus_per_node", "0"),
        (["cluster.nodes=2"], "cluster.nodes", "2, without an address"),
        (["cluster.address=somewhere"], "cluster.address", '"somewhere"'),
        (["cluster.address=ray://head:10001"], "cluster.address", '"ray://head:10001"'),
        (["cluster.wait_s=-1"], "cluster.wait_s", "-1"),
        (["cluster.straggler_timeout_s=0"], "cluster.straggler_timeout_s", "0"),
        (["cluster.max_restarts=-1"], "cluster.max_restarts", "-1"),
        (
            ["cluster.generator_gpus_per_node=1", "cluster.gpus_per_node=2"],
            "cluster.generator_gpus_per_node",
            '1, with placement = "colocated"',
        ),
        (
            ['cluster.placement="separate"', "cluster.gpus_per_node=2"],
            "cluster.generator_gpus_per_node",
            '0 of 2, with placement = "separate"',
        ),
        (
            ['cluster.placement="separate"', "cluster.generator_gpus_per_node=1"],
            "cluster.generator_gpus_per_node",
            '1 of 1, with placement = "separate"',
        ),
    ],
)
def test_layouts_that_cannot_be(prepared: Prepare, overrides: list[str], path: str, found: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(*overrides)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (path, found)


def test_generators_span_whole_numbers_of_a_nodes_ranks(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("cluster.gpus_per_node=3", "generator.ranked.span=2")
    (problem,) = raised.value.problems
    assert (problem.path, problem.expected) == ("cluster.gpus_per_node", "a multiple of 2")
    assert prepared("cluster.gpus_per_node=4", "generator.ranked.span=2").ranks_per_generator == 2
    assert prepared("generator.ranked.span=2").ranks_per_generator == 1


def test_a_defect_of_a_plugin_that_says_what_it_spans_is_named(prepared: Prepare) -> None:
    found = prepared("cluster.gpus_per_node=2")
    entry = found.chosen["generator"]
    assert entry.provider is not None
    broken = evolve(entry, provider=evolve(entry.provider, num_devices=lambda config: 1 // 0))
    with pytest.raises(PluginError, match="its function `num_devices` raised ZeroDivisionError"):
        ranks_per_generator(found.recipe, {"generator": broken})


@pytest.mark.parametrize(
    ("overrides", "expected"), [([], 1), (["cluster.gpus_per_node=3"], 3), (["cluster.nodes=2", "cluster.address=auto"], 2)]
)
def test_backends_check_the_number_of_ranks(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: int
) -> None:
    from rlcore.run.plan import checks

    seen: list[CheckContext] = []
    monkeypatch.setattr(checks, "run_check", lambda entry, context, config: seen.append(context) or ())
    prepared(*overrides)
    assert {context.world_size for context in seen} == {expected}
    assert {context.generator_devices for context in seen} == {None}


def test_a_generator_learns_of_the_devices_that_it_spans(prepared: Prepare) -> None:
    shared = prepared("cluster.gpus_per_node=4", "generator.ranked.span=2")
    for device, expected in (("cpu", None), ("cuda", (2, 3))):
        rank_info = RankInfo(rank=6, world_size=8, local_rank=2, device=device)  # type: ignore[arg-type]
        assert evolve(shared, device=device).generator_context(rank_info, None).devices == expected


def test_between_devices_weights_take_other_ways(prepared: Prepare) -> None:
    separate = ("run.device=cuda", "model.dtype=float32", 'cluster.placement="separate"', "cluster.gpus_per_node=2")
    with pytest.raises(PluginError, match=r"cuda.*: nccl, shards, directory. .*refit.in_process"):
        prepared(*separate, "cluster.generator_gpus_per_node=1")


def test_without_ray_the_way_to_install_it_is_said(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore_ray.provider.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"pip install 'rlcore\[ray\]'"):
        prepared("cluster.gpus_per_node=2", "cluster.call_timeout_s=5")


def test_a_run_in_one_process_imports_no_ray(prepared: Prepare) -> None:
    recipe = prepared("run.num_steps=1", "data.train.limit=6").recipe
    folder = Path(recipe.run.directory).parent
    script = f"""
import sys
from pathlib import Path
from rlcore.run.plan.channel import ranks_per_generator
from rlcore.run.report.progress import Progress
from rlcore.run.plan.prepare import prepare
from rlcore.run.train import train
from rlcore.testing.fakes import FakeTokenizer
recipe = prepare(Path({str(folder / "recipe.toml")!r}), ["run.num_steps=1", "run.directory={folder / "runs"}"])
train(recipe, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
print(sorted({{"ray", "torch"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr


def test_the_ranks_per_node_are_what_is_left() -> None:
    cluster = RayConfig(nodes=2, gpus_per_node=8, placement="separate", generator_gpus_per_node=3)
    assert (cluster.ranks_per_node, cluster.world_size) == (5, 10)
