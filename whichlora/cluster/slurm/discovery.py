"""What `sinfo` prints → the GPU types of the cluster, and how a job asks for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import ParallelConfig

# Old option letters, since the JSON of sinfo changes its schema between releases.
SINFO_FORMAT = "%R|%a|%N|%t|%G|%f"

_GRES = re.compile(r"\bgpu:(?:([^:,()]+):)?(\d+)")
_SIZE = re.compile(r"(\d+)\s?gi?b?(?![a-z])", re.IGNORECASE)
_KEY_SIZE = re.compile(r"-(\d+)gb$")
_GONE = ("down", "drain", "drng", "fail", "unk", "inval")  # as the states begin
_MAKERS = {"nvidia", "amd", "tesla", "geforce", "quadro", "instinct", "gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNode:
    """One node's GPUs of one type.

    Args:
        gres_type: None where Slurm knows only their number.
        features: what the administrator wrote about the node.
    """

    name: str
    gres_type: str | None
    num_gpus: int
    features: frozenset[str]
    partitions: frozenset[str]
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """GPUs that are asked for in one way and are taken for one accelerator.

    Args:
        name: names the group's folder and jobs.
        gpu: key of the catalogue; until a node's driver has said it, an assumption.
        others: keys that the type and features would also allow.
        constraint: what tells these nodes from others of the same type; empty where none is needed.
        most_on_a_node: of these GPUs, those of the node with most; 0 where that is not known.
        note: what the user should know about how these GPUs are asked for.
    """

    name: str
    gpu: str
    others: tuple[str, ...] = ()
    cluster: str = ""
    partitions: tuple[str, ...] = ()
    gres_type: str | None = None
    constraint: str = ""
    num_nodes: int = 0
    num_gpus: int = 0
    most_on_a_node: int = 0
    note: str = ""

    def has(self, config: ParallelConfig) -> bool:
        """Whether there are as many nodes with as many GPUs; a cloud has any number."""
        if not self.most_on_a_node:
            return True
        return config.nodes <= self.num_nodes and config.gpus_per_node <= self.most_on_a_node

    def gres(self, count: int = 1) -> str:
        """So many of these GPUs on a node, as `--gres` spells it."""
        return f"gpu:{self.gres_type}:{count}" if self.gres_type else f"gpu:{count}"


def parse_nodes(text: str, *, cluster: str = "") -> list[GpuNode]:
    """The GPU nodes in `sinfo -h -N -o SINFO_FORMAT`, each type of each node once.

    A node stands there once per partition. Those that are down, and partitions that are, are left
    out: what nobody can run on need not be predicted.
    """
    nodes: dict[tuple[str, str | None], GpuNode] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 6:
            continue
        partition, available, name, state, gres, features = fields
        if available != "up" or state.startswith(_GONE):
            continue
        for match in _GRES.finditer(gres):
            key = (name, match[1])
            earlier = nodes.get(key)
            nodes[key] = GpuNode(
                name=name,
                gres_type=match[1],
                num_gpus=int(match[2]),
                features=frozenset(features.split(",")) - {"(null)", ""},
                partitions=(earlier.partitions if earlier else frozenset()) | {partition},
                cluster=cluster,
            )
    return list(nodes.values())


def gpu_groups(
    nodes: Iterable[GpuNode],
    catalogue: Sequence[GpuSpec],
    named: Mapping[str, str],
    *,
    partitions: Sequence[str] = (),
) -> tuple[list[GpuGroup], list[str]]:
    """The groups of `nodes`, and a line about each kind of node that nothing is known of.

    Nodes whose features differ in other things than the GPU (rack, network) stay together.

    Args:
        named: Slurm's types or features to keys, given by the user; goes before any guess.
        partitions: the only ones to use; empty is all.
    """
    usable = [node for node in nodes if not partitions or node.partitions & set(partitions)]
    keys = {node: matching_gpus(node, catalogue, named) for node in usable}
    faults = []
    members: dict[tuple[str, str, tuple[str, ...]], list[GpuNode]] = {}
    for node in usable:
        if keys[node]:
            members.setdefault((node.cluster, node.gres_type or "", keys[node]), []).append(node)
        else:
            faults.append(_unknown(node))
    groups = []
    for (cluster, gres_type, group_keys), group_nodes in members.items():
        rivals = [
            node
            for node in usable
            if node not in group_nodes
            and node.cluster == cluster
            and (not gres_type or node.gres_type == gres_type)
        ]
        inside_of, constraint, note = _apart(group_nodes, rivals, group_keys[0], partitions)
        if len(group_keys) > 1:
            note = "; ".join(filter(None, (note, f"could also be {', '.join(group_keys[1:])}")))
        groups.append(
            GpuGroup(
                name=_slug(cluster, gres_type or "gpu", constraint),
                gpu=group_keys[0],
                others=group_keys[1:],
                cluster=cluster,
                partitions=inside_of,
                gres_type=gres_type or None,
                constraint=constraint,
                num_nodes=len({node.name for node in group_nodes}),
                num_gpus=sum(node.num_gpus for node in group_nodes),
                most_on_a_node=max(node.num_gpus for node in group_nodes),
                note=note,
            )
        )
    return _distinct(groups), list(dict.fromkeys(faults))


def matching_gpus(
    node: GpuNode, catalogue: Sequence[GpuSpec], named: Mapping[str, str]
) -> tuple[str, ...]:
    """Keys of the accelerators that `node` may hold, the least capable first.

    Predicting for the least capable is the safe side: what fits there fits on the others.
    """
    for text in (*sorted(node.features), node.gres_type or "gpu"):
        if text in named:
            return (named[text],)
    features = frozenset(word for text in node.features for word in _words(text))
    if _is_slice(node):
        return ()  # a slice of a GPU is in no catalogue; the user may describe one and name it
    specs = _by_type(node.gres_type, catalogue) if node.gres_type else []
    if not node.gres_type:
        boards = [_words(text) for text in node.features if _looks_like_a_board(text)]
        specs = [spec for spec in catalogue if any(board <= _words(spec.key) for board in boards)]
    sizes = {
        int(match[1])
        for text in (*node.features, node.gres_type or "")
        for match in _SIZE.finditer(text)
    }
    specs = [spec for spec in specs if _size(spec) in sizes] or specs
    for word in sorted(features):
        specs = [spec for spec in specs if word in _words(spec.key)] or specs
    ordered = sorted(specs, key=lambda spec: (spec.memory_bytes, spec.bandwidth_bytes_per_s))
    return tuple(spec.key for spec in ordered)


def _apart(
    group_nodes: Sequence[GpuNode], rivals: Sequence[GpuNode], gpu: str, allowed: Sequence[str]
) -> tuple[tuple[str, ...], str, str]:
    """Partitions, constraint and note that keep a job off `rivals`.

    Partitions without a rival are enough; else features that every own node, or each, has alone,
    and rather those about the GPU than about the rack.
    """

    def telling(feature: str) -> tuple[bool, int, str]:
        return (not _words(feature) & _words(gpu), len(feature), feature)

    inside = frozenset[str]().union(*(node.partitions for node in group_nodes))
    if allowed:
        inside &= set(allowed)
    mixed = frozenset[str]().union(*(node.partitions for node in rivals))
    clean = inside - mixed
    if clean and all(node.partitions & clean for node in group_nodes):
        return tuple(sorted(clean)), "", ""
    foreign = frozenset[str]().union(*(node.features for node in rivals))
    shared = frozenset.intersection(*(node.features for node in group_nodes)) - foreign
    if shared:
        return tuple(sorted(inside)), min(shared, key=telling), ""
    each = [node.features - foreign for node in group_nodes]
    if all(each):
        return (
            tuple(sorted(inside)),
            "|".join(sorted({min(texts, key=telling) for texts in each})),
            "",
        )
    note = "no feature tells these nodes from others; the driver on the node decides what ran"
    return tuple(sorted(clean or inside)), "", note


def _unknown(node: GpuNode) -> str:
    kind = node.gres_type or "untyped"
    features = ",".join(sorted(node.features)) or "none"
    kind_text = "a slice of a GPU (MIG)" if _is_slice(node) else "no accelerator of the catalogue"
    return (
        f"GPU {kind!r} with features {features} in partition {','.join(sorted(node.partitions))}: "
        f"is {kind_text}; name it in the config as slurm.gpus: {{{node.gres_type or 'gpu'}: KEY}}, "
        "with a key of 'whichlora gpus' or of a gpu.json of your own"
    )


def _is_slice(node: GpuNode) -> bool:
    return bool(re.search(r"\d+g\.\d+gb", node.gres_type or "", re.IGNORECASE)) or (
        node.gres_type is None and "mig" in {text.lower() for text in node.features}
    )


def _words(text: str) -> frozenset[str]:
    """`nvidia_a100-sxm4-80gb` → a100, sxm, 80gb: what the keys of the catalogue are made of."""
    text = re.sub(r"(sxm)\d\b", r"\1", text.lower().replace("_", "-"))
    words = set(re.split(r"[^a-z0-9.]+", text)) - _MAKERS - {""}
    return frozenset(re.sub(r"^(\d+)g$", r"\1gb", word) for word in words)


def _by_type(gres_type: str, catalogue: Sequence[GpuSpec]) -> list[GpuSpec]:
    """By the driver's name, as Slurm's own detection spells it, else by the words of the key."""
    squashed, wanted = _squash(gres_type), _words(gres_type)
    named = [spec for spec in catalogue if squashed in map(_squash, spec.names)]
    return named or [
        spec
        for spec in catalogue
        if (wanted and wanted <= _words(spec.key)) or squashed in map(_squash, spec.aliases)
    ]


def _squash(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _looks_like_a_board(text: str) -> bool:
    """Whether a feature names a GPU: a letter and a number, as in A100, L4 or RTX6000."""
    return any(re.fullmatch(r"[a-z]+\d+[a-z]*", word) for word in _words(text))


def _size(spec: GpuSpec) -> int:
    match = _KEY_SIZE.search(spec.key)
    return int(match[1]) if match else 0


def _slug(*parts: str) -> str:
    text = "-".join(filter(None, parts)).lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:60]


def _distinct(groups: Sequence[GpuGroup]) -> list[GpuGroup]:
    """`groups` in order of their names, where two would be one made different by their key."""
    names = [group.name for group in groups]
    named = [
        replace(group, name=_slug(group.name, group.gpu)) if names.count(group.name) > 1 else group
        for group in groups
    ]
    return sorted(named, key=lambda group: group.name)
