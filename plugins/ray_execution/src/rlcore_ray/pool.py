"""The pool: one worker a rank, started together, called together, and given up together."""

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from attrs import evolve

from rlcore.execution import (
    BackendArguments,
    ChosenPlugins,
    ExecutionContext,
    GeneratorArguments,
    TrainerArguments,
    model_width,
)
from rlcore.gpu import Device
from rlcore.spi import (
    Backends,
    ConfigError,
    ContractError,
    PluginError,
    Problem,
    RankInfo,
    StorageError,
    TrainerLayout,
    WorkerError,
)
from rlcore.spi.capabilities import TOKEN_STREAMING
from rlcore_ray.calls import BESIDE, COLLECT, Calls, Rank
from rlcore_ray.collector_hosts import CollectorPlaces
from rlcore_ray.commands import Arrival, BuildCommand, Built, GeneratorCommand, TrainedModel, WorkerEnv
from rlcore_ray.config import RayConfig
from rlcore_ray.elastic import ElasticEngines, EngineSetup
from rlcore_ray.engines import Engines
from rlcore_ray.failures import PoolName, WorkerInfo
from rlcore_ray.nodes import grouped, note_clocks, require_same, require_shared
from rlcore_ray.orphan_processes import end_everywhere
from rlcore_ray.placement import reserved
from rlcore_ray.pool_groups import PoolGenerator, PoolRoute, PoolTrainer

ARRIVE_S = 120.0
"""Most seconds for Ray to start the processes."""


@contextmanager
def open_pool(context: ExecutionContext, cluster: RayConfig) -> Iterator[Backends]:
    """Start workers with trainer and generator, and others for a reference with devices of its own; end them in any case."""
    _require_gpus(context.arguments, cluster)
    arguments, progress, log_directory = context.arguments, context.progress, context.arguments.log_directory
    logs = (log_directory or Path(tempfile.mkdtemp(prefix="rlcore-logs-"))).absolute()
    names: tuple[PoolName, ...] = ("trainer", "reference") if arguments.reference is not None else ("trainer",)
    with reserved(cluster, arguments.device) as (group, nodes):
        if nodes < cluster.nodes:
            progress.note(
                f"the run goes on with {nodes} of {cluster.nodes} nodes (cluster.min_nodes = {cluster.min_nodes}); "
                "the others are not there. They take part again from the next restart on"
            )
        cluster = evolve(cluster, nodes=nodes)
        progress.phase("workers")
        pools = [
            Calls(
                ranks=_start_ranks(arguments.device, cluster, group, logs, pool), cluster=cluster, progress=progress, pool=pool
            )
            for pool in names
        ]
        name = uuid4().hex
        slots = () if cluster.elastic is None else range(cluster.world_size, cluster.world_size + cluster.elastic.max)
        engines = Engines(pools[0], _hosts(arguments, cluster), slots)
        elastic = None if cluster.elastic is None else _elastic_engines(context, cluster, engines, logs, name)
        try:
            yield _set_up(context, cluster, pools, logs, name, group, engines, elastic)
            _close(pools, elastic)
        except StorageError:
            _close(pools, elastic)  # ranks are well, and engines among them have files of their own to remove
            raise
        except WorkerError:
            workers = [worker for calls in pools for worker in calls.workers]
            workers += [] if elastic is None else elastic.workers
            _kill(pools, elastic)
            end_everywhere(name, workers, progress)  # others may be started in their place
            raise
        finally:
            _kill(pools, elastic)


def _require_gpus(arguments: BackendArguments, cluster: RayConfig) -> None:
    """ConfigError where an engine that joins would have fewer devices than it spans."""
    span = 1 if arguments.generator is None else arguments.generator.ranks_per_generator
    if cluster.elastic is not None and cluster.elastic.gpus < span:
        found = f"{cluster.elastic.gpus}, where an engine spans {span} devices"
        raise ConfigError([Problem(path="cluster.elastic.gpus", found=found, expected="as many as an engine spans")])


def _close(pools: Sequence[Calls], elastic: ElasticEngines | None) -> None:
    if elastic is not None:
        elastic.close()
    for calls in pools:
        calls.close()


def _kill(pools: Sequence[Calls], elastic: ElasticEngines | None) -> None:
    if elastic is not None:
        elastic.kill()
    for calls in pools:
        calls.kill()


def _start_ranks(device: Device, cluster: RayConfig, group: Any, logs: Path, pool: PoolName) -> list[Rank]:
    """Start a process for each rank of a pool. Where devices are separate, a node's first rank holds those that generate
    too."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rlcore_ray.worker import Worker

    actor: Any = ray.remote(concurrency_groups={BESIDE: 1, COLLECT: 1})(Worker)  # type: ignore[call-overload]
    ranks = []
    per_node = _ranks_per_node(cluster, pool)
    for number in range(cluster.nodes * per_node):
        node, local_rank = divmod(number, per_node)
        devices = 1 + (cluster.generator_gpus_per_node if pool == "trainer" and local_rank == 0 else 0)
        log_file = logs / (f"rank-{number}.log" if pool == "trainer" else f"{pool}-rank-{number}.log")
        options: dict[str, Any] = {
            "num_cpus": devices,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        }
        if device == "cuda":
            # Ranks of a node have to see each other's devices; `Worker.prepare` says which, and in which order.
            variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            options |= {"num_gpus": devices, "runtime_env": {"env_vars": variables}}
        handle = actor.options(**options).remote(number, log_file, pool)
        ranks.append(Rank(worker=WorkerInfo(rank=number, pool=pool, log_file=log_file), actor=handle))
    return ranks


def _elastic_engines(context: ExecutionContext, cluster: RayConfig, engines: Engines, logs: Path, name: str) -> ElasticEngines:
    """Return the engines that join and leave; none is started yet."""
    import ray

    decoder: bytes = ray.cloudpickle.dumps(context.arguments.decoder)  # type: ignore[no-untyped-call]
    surroundings = WorkerEnv(
        pool=name,
        gpu_ids=(),
        rank_gpu_ids=(),
        ranks_on_node=cluster.gpus_per_node,
        directory=Path.cwd(),
        num_threads=os.environ.get("OMP_NUM_THREADS"),
    )
    setup = EngineSetup(
        arguments=context.arguments,
        plugins=context.plugins.chosen(),
        decoder=decoder,
        surroundings=surroundings,
        logs=logs,
    )
    return ElasticEngines(
        engines, cluster, setup, partial(_start_engine, context.arguments.device, cluster, logs), context.progress
    )


def _start_engine(device: Device, cluster: RayConfig, logs: Path, slot: int) -> Rank:
    """Start the process of one engine, which Ray places on any node once that has room."""
    import ray

    from rlcore_ray.worker import Worker

    assert cluster.elastic is not None
    actor: Any = ray.remote(concurrency_groups={BESIDE: 1, COLLECT: 1})(Worker)  # type: ignore[call-overload]
    log_file = logs / f"engine-{slot}.log"
    options: dict[str, Any] = {"num_cpus": cluster.elastic.gpus, "scheduling_strategy": "SPREAD"}
    if device == "cuda":
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        options |= {"num_gpus": cluster.elastic.gpus, "runtime_env": {"env_vars": variables}}
    handle = actor.options(**options).remote(slot, log_file, "engine")
    return Rank(worker=WorkerInfo(rank=slot, pool="engine", log_file=log_file), actor=handle)


def _ranks_per_node(cluster: RayConfig, pool: PoolName) -> int:
    return cluster.ranks_per_node if pool == "trainer" else cluster.reference_gpus_per_node


def _set_up(
    context: ExecutionContext,
    cluster: RayConfig,
    pools: Sequence[Calls],
    logs: Path,
    name: str,
    group: Any,
    engines: Engines,
    elastic: ElasticEngines | None,
) -> Backends:
    """Build the backends in bare processes."""
    import ray

    arguments, (calls, *others) = context.arguments, pools
    rank_infos = _meet(context, cluster, calls, name)
    of_reference = [(pool, _meet(context, cluster, pool, name)) for pool in others]
    decoder: bytes = ray.cloudpickle.dumps(arguments.decoder)  # type: ignore[no-untyped-call]
    layouts = _build(calls, [_build_order(arguments.trainer, arguments.critic, rank_info) for rank_info in rank_infos])
    hosts = engines.hosts
    if arguments.generator is not None:
        hosted = {rank: (_generator_order(arguments.generator, cluster, decoder, rank_infos[rank], logs),) for rank in hosts}
        calls.apart("build_generator", hosted, limit_s=cluster.start_timeout_s)
    surroundings = surroundings_of(calls.workers, cluster, name)
    places = CollectorPlaces.of(calls, hosts, group, logs, surroundings) if hosts else None
    if elastic is not None:
        elastic.open()
    backends = _backends(arguments, calls, layouts, others, engines, places, elastic)
    for pool, infos in of_reference:
        assert arguments.reference is not None
        of_each = _build(pool, [_build_order(arguments.reference, None, rank_info) for rank_info in infos])
        backends = evolve(backends, reference=_trainer(arguments, arguments.reference, pool, of_each, "policy"))
    return backends


def _meet(context: ExecutionContext, cluster: RayConfig, calls: Calls, name: str) -> list[RankInfo]:
    """Have the ranks of a pool load what the driver chose, and know how they find each other."""
    began = time.time()
    arrived: list[Arrival] = calls.all("arrive", limit_s=ARRIVE_S)
    calls.locate([arrival.worker for arrival in arrived])
    require_same(calls.workers, [arrival.software for arrival in arrived])
    require_shared(calls, context.arguments.log_directory)
    note_clocks(arrived, began, time.time(), context.progress)
    surroundings = surroundings_of(calls.workers, cluster, name)
    _load_plugins(context.plugins.chosen(), calls, surroundings)
    num_ranks, per_node = len(calls.ranks), _ranks_per_node(cluster, calls.pool)
    rendezvous = calls.apart("rendezvous", {0: ()}, limit_s=ARRIVE_S)[0] if num_ranks > 1 else None
    device = context.arguments.device
    return [
        RankInfo(rank=rank, world_size=num_ranks, local_rank=rank % per_node, device=device, rendezvous=rendezvous)
        for rank in range(num_ranks)
    ]


def _build(calls: Calls, orders: Sequence[BuildCommand]) -> list[TrainerLayout]:
    """Build what the ranks of a pool hold; the layout of each."""
    built: list[Built] = calls.all("build", each=[(order,) for order in orders], limit_s=calls.cluster.start_timeout_s)
    return [each.layout for each in built]


def _backends(
    arguments: BackendArguments,
    calls: Calls,
    layouts: Sequence[TrainerLayout],
    others: Sequence[Calls],
    engines: Engines,
    places: CollectorPlaces | None,
    elastic: ElasticEngines | None,
) -> Backends:
    trainer, critic = _trainer(arguments, arguments.trainer, calls, layouts, "policy"), None
    if arguments.critic is not None:
        critic = _trainer(arguments, arguments.critic, calls, layouts, "critic")
    if arguments.generator is None:
        return Backends(trainer=trainer, generator=None, route=None)
    able = arguments.generator.capabilities - {TOKEN_STREAMING}  # readers are in this process, the generators in others
    generator = PoolGenerator(calls=calls, capabilities=able, engines=engines, beside=others, places=places)
    route = PoolRoute(calls=calls, engines=engines, elastic=elastic)
    return Backends(trainer=trainer, generator=generator, route=route, critic=critic)


def _trainer(
    arguments: BackendArguments, own: TrainerArguments, calls: Calls, layouts: Sequence[TrainerLayout], model: TrainedModel
) -> PoolTrainer:
    return PoolTrainer(
        calls=calls,
        capabilities=own.capabilities,
        model=model,
        members=_data_parallel(layouts),
        max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
        temperature=arguments.temperature,
        width=model_width(own.context.model.path),
        whole_groups=arguments.whole_groups,
    )


def _hosts(arguments: BackendArguments, cluster: RayConfig) -> list[int]:
    """The ranks with a generator."""
    if arguments.generator is None:
        return []
    shared = arguments.generator.ranks_per_generator
    return [rank for rank in range(cluster.world_size) if cluster.hosts_generator(rank, shared)]


def surroundings_of(workers: Sequence[WorkerInfo], cluster: RayConfig, pool: str) -> list[WorkerEnv]:
    """Return the process around each rank. A rank sees all devices of its node: the first one of each rank, by local rank, then
    those that only generate."""
    devices: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for worker in workers:
        firsts, others = devices[worker.node_id]
        firsts += worker.gpu_ids[:1]
        others += worker.gpu_ids[1:]
    on_node = {node: (*firsts, *others) for node, (firsts, others) in devices.items()}
    return [
        WorkerEnv(
            pool=pool,
            gpu_ids=on_node[worker.node_id],
            rank_gpu_ids=worker.gpu_ids[:1],
            ranks_on_node=cluster.ranks_per_node + cluster.reference_gpus_per_node,
            directory=Path.cwd(),
            num_threads=os.environ.get("OMP_NUM_THREADS"),
        )
        for worker in workers
    ]


def _build_order(trainer: TrainerArguments, critic: TrainerArguments | None, rank_info: RankInfo) -> BuildCommand:
    return BuildCommand(trainer=trainer.on(rank_info), critic=None if critic is None else critic.on(rank_info))


def _generator_order(
    arguments: GeneratorArguments, cluster: RayConfig, decoder: bytes, rank_info: RankInfo, logs: Path
) -> GeneratorCommand:
    # Engines of several ranks must not write into one file.
    directory = logs if rank_info.world_size == 1 else logs / f"rank-{rank_info.rank}"
    return GeneratorCommand(arguments=arguments.on(rank_info, cluster, directory), decoder=decoder)


def _load_plugins(plugins: ChosenPlugins, calls: Calls, surroundings: Sequence[WorkerEnv]) -> None:
    """Load on every rank the plugins that the driver chose; one PluginError names all nodes where they are missing."""
    outcomes = calls.outcomes("prepare", each=[(plugins, each) for each in surroundings], limit_s=ARRIVE_S)
    failed = [(calls.workers[rank].node, outcome) for rank, outcome in outcomes.items() if isinstance(outcome, PluginError)]
    if failed:
        by_reason = grouped([(str(error), node) for node, error in failed])
        lines = "".join(f"\n  - node(s) {', '.join(nodes)}: {reason}" for reason, nodes in by_reason.items())
        raise PluginError(f"not every node has the plugins that the driver chose:{lines}")
    calls.values(outcomes)


def _data_parallel(layouts: Sequence[TrainerLayout]) -> list[list[int]]:
    """The ranks of each data-parallel rank, the lowest first; ContractError unless they divide evenly."""
    size = layouts[0].data_parallel_size
    members: list[list[int]] = [[] for _ in range(size)]
    for rank, layout in enumerate(layouts):
        if layout.data_parallel_size != size:
            raise ContractError(f"layout: rank {rank} has data_parallel_size {layout.data_parallel_size}; rank 0 has {size}")
        members[layout.data_parallel_rank].append(rank)
    if len({len(ranks) for ranks in members}) != 1:
        raise ContractError(
            f"layout: found data-parallel ranks of {[len(ranks) for ranks in members]} ranks; expected equally many"
        )
    return members
