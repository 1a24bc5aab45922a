"""The GPUs of a serving engine: the nodes that they are on, and what they send each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from whichlora.predict.rank_time import links_of, over_nodes, usual_links
from whichlora.predict.resolve import ResolvedRun
from whichlora.predict.words import gpus_in_words
from whichlora.serving.step_time import own_all_reduce
from whichlora.serving.unified_memory import is_unified
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.links import LEAST_HOST_BYTES_PER_S, LinkSpec
from whichlora.spec.parallel import ParallelConfig
from whichlora.timing.links import Group, collective_s, group_of, on_node_s
from whichlora.units import MiB

_LARGE_BYTES = 128 * MiB  # of an all-reduce that has the full bandwidth
# Bandwidth in a collective above which GPUs are joined by NVLink, and the engines' own all-reduce
# runs. Source: vLLM 0.33.0 distributed/device_communicators/custom_all_reduce.py; measured PCIe
# machines of `calibration/links` have 10 to 25 GB/s.
_JOINED_BYTES_PER_S = 50e9


def machines_of(job: ResolvedRun, machines: Mapping[str, LinkSpec]) -> Mapping[str, LinkSpec]:
    """`machines` with as many GPUs each as those of `job` have, where it states how many these are.

    Between them it is the network of a machine that is known.
    """
    nodes = job.engine.stated_nodes(job.run)
    if nodes is None:
        return machines
    each = job.engine.num_gpus(job.run) // nodes
    return {name: replace(links, gpus_per_node=each) for name, links in machines.items()}


def reduction_s(
    ranks: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec]
) -> Callable[[float], float] | None:
    """Seconds of an all-reduce of the ranks that share every matrix, by bytes.

    None where their links are not known. Between nodes it is NCCL's: the engines' own kernel reads
    the memory of the other GPUs.

    Kind: estimate. Source: `in_the_same_node_as` in distributed/device_communicators/: vLLM 0.33.0
    custom_all_reduce.py:201, SGLang 0.5.23 custom_all_reduce_utils.py:460.
    """
    if ranks == 1:
        return lambda num_bytes: 0.0
    config, links, _ = _placed(ranks, gpu, machines)
    if links is None:
        return None
    group = group_of(ranks, 1, config.gpus_per_node)
    if group.nodes > 1:
        return lambda num_bytes: float(collective_s(links, "all_reduce", num_bytes, group))
    bandwidth = 2 * (ranks - 1) / ranks * _LARGE_BYTES
    bandwidth /= float(on_node_s(links, "all_reduce", _LARGE_BYTES, ranks))
    if math.isnan(bandwidth):
        return None
    if bandwidth > _JOINED_BYTES_PER_S:
        return own_all_reduce(bandwidth, ranks)
    return lambda num_bytes: float(on_node_s(links, "all_reduce", num_bytes, ranks))


def exchange_s(
    ranks: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec], *, gathered_share: float
) -> Callable[[float], float] | None:
    """Seconds in which ranks with own sequences exchange states around experts, by bytes of one.

    All gather the states of all before the experts, and each gets the sums of its own after them.
    None where their links are not known.

    Args:
        gathered_share: bytes of a gathered state over those of a summed one.

    Kind: estimate: what was chosen for each token is left out. Source: vLLM 0.33.0
    distributed/device_communicators/all2all.py:55 `AgRsAll2AllManager`.
    """
    if ranks == 1:
        return lambda num_bytes: 0.0
    config, links, _ = _placed(ranks, gpu, machines)
    if links is None:
        return None
    group = group_of(ranks, 1, config.gpus_per_node)

    def seconds(num_bytes: float) -> float:
        of_all = ranks * num_bytes
        gathered = collective_s(links, "all_gather", gathered_share * of_all, group)
        return float(gathered + collective_s(links, "reduce_scatter", of_all, group))

    return None if math.isnan(seconds(1.0)) else seconds


def sends_s(
    ranks: int, stages: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec]
) -> Callable[[float], float] | None:
    """Seconds of all sends from stage to stage, by the bytes of one batch's states.

    Each of `ranks` sends its share, which those of the next stage then gather. None where the
    links are not known.

    Kind: estimate: the host's message about shapes is left out. Source: vLLM 0.33.0
    distributed/parallel_state.py `isend_tensor_dict`, `irecv_tensor_dict`; stages are numbered
    after ranks, :2079 `initialize_model_parallel`.
    """
    if stages == 1:
        return lambda num_bytes: 0.0
    config, links, _ = _placed(ranks * stages, gpu, machines)
    if links is None:
        return None
    per_node = config.gpus_per_node
    nodes = [stage * ranks // per_node for stage in range(stages)]
    crossing = sum(node != after for node, after in itertools.pairwise(nodes))
    there, gathering = Group(on_node=1, nodes=2, sharing=per_node), group_of(ranks, 1, per_node)
    here = Group(on_node=2, nodes=1)

    def seconds(num_bytes: float) -> float:
        each = num_bytes / ranks
        sent = (stages - 1 - crossing) * collective_s(links, "send", each, here)
        if crossing:
            sent += crossing * collective_s(links, "send", each, there)
        if ranks > 1:
            sent += (stages - 1) * collective_s(links, "all_gather", num_bytes, gathering)
        return float(sent)

    return None if math.isnan(seconds(1.0)) else seconds


def host_bytes_per_s(gpu: GpuSpec, machines: Mapping[str, LinkSpec]) -> float:
    """Bytes a second that `gpu` copies from pinned memory of its host.

    Kind: estimate. Source: `LinkSpec.host_bytes_per_s`; of PCIe 3.0 x16 where no machine is known.
    """
    usual = usual_links(gpu, machines)
    return usual[0].host_bytes_per_s if usual else LEAST_HOST_BYTES_PER_S


def nodes_note(
    gpus: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec], *, stated: bool = False
) -> str:
    """How `gpus` of an engine are placed; empty where one node has them.

    Args:
        stated: whether the run says how many machines there are.
    """
    _, links, note = _placed(gpus, gpu, machines)
    if not note or links is None or links.network is None:
        return ""
    note = note.partition(", since")[0] if stated else note
    return f"{note}; they are joined by {links.network.name}"


def num_nodes(gpus: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec]) -> int:
    """Machines that `gpus` of an engine are on."""
    return _placed(gpus, gpu, machines)[0].nodes


def unlinked(
    gpus: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec], *, stated: int | None = None
) -> str:
    """Why nothing is known of what `gpus` of an engine send each other.

    Args:
        stated: machines that the run says there are; None where it does not.
    """
    usual = usual_links(gpu, machines)
    if usual and (stated or 1) > 1 and all(links.network is None for links in usual):
        return f"no network between machines with {gpu.key} is known"
    most = max((links.gpus_per_node for links in usual), default=0)
    if gpus <= most or not usual:
        return f"no links of machines with {gpu.key} are known"
    if all(links.network is None for links in usual):
        has = gpus_in_words(most)
        return f"machines with {gpu.key} have {has} at most, and no network is known of them"
    return f"{gpus} GPUs are not equally many on nodes of {most} {gpu.key} at most"


def _placed(
    gpus: int, gpu: GpuSpec, machines: Mapping[str, LinkSpec]
) -> tuple[ParallelConfig, LinkSpec | None, str]:
    """The GPUs of an engine over the fewest nodes, their links, and a note of several nodes."""
    asked = ParallelConfig(strategy="tp", gpus=gpus)
    usual = usual_links(gpu, machines)
    is_alone = is_unified(gpu)  # its memory is that of its machine
    if gpus > 1 and (usual or is_alone) and all(links.gpus_per_node == 1 for links in usual):
        asked = replace(asked, nodes=gpus)
    config, note = over_nodes(asked, gpu, machines, hint="")
    if asked.nodes > 1:
        note = f"{gpus} GPUs: taken as {gpus} nodes of 1"
    links, _ = links_of(config, gpu, machines)
    return config, links, note
