"""The entries of the ledger at one moment as lines: shape, formula with numbers, bytes, source."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from whichlora.memory import allocator, layer_passes, weights
from whichlora.memory.entries import Entry, Fact, Group
from whichlora.memory.training import Ledger, training_ledger
from whichlora.predict.coefficients import Calibration
from whichlora.predict.judgement import ALLOCATED_PARTS
from whichlora.predict.quantities import num_trained, pool_bytes, training_step
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.dtypes import is_quantised, quantises_head
from whichlora.spec.layer import Linear
from whichlora.spec.results import MemoryPrediction

_KEPT_PARTS = ("weights", "adapters", "optimizer_states")  # between steps, in dtypes at rest
_DTYPES = {1: "bool", 2: "bf16", 4: "fp32", 8: "int64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One entry of the ledger, or one tensor of it.

    Args:
        shape: in our names, with the dtype the formula.
        count: how many such tensors, in our names.
        numbers: count, dimensions and bytes per element put in; empty where the entry is no
            product, such as the sum of its members.
        members: the tensors of a group, largest first; they add up to it.
    """

    part: str
    what: str
    shape: str
    dtype: str
    count: str
    numbers: str
    num_bytes: int
    kind: str
    source: str
    why: str
    members: tuple[Line, ...] = ()


def lines_at(
    job: ResolvedRun, counted_ledger: Ledger, memory: MemoryPrediction, calibration: Calibration
) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """What is allocated at the peak of `memory`, and what the card holds beyond; largest first.

    The first add up to `peak_allocated_bytes`, both to `device_used_bytes`: where measured runs
    corrected a part of the ledger, the correction is a line.
    """
    entries = counted_ledger.moments[memory.moment]
    if job.layout is None:
        sizes = _sizes(job)
        lines = [_line(job, entry, sizes) for entry in entries]
    else:
        lines = _rank_lines(job, entries, memory.moment)
    lines.append(_bare(allocator.WORKSPACE, counted_ledger.workspace_in(memory.moment)))
    factors = calibration.memory.mean
    for part in ALLOCATED_PARTS:
        counted = sum(line.num_bytes for line in lines if line.part == part)
        correction = memory.breakdown[part] - counted
        if correction:
            lines.append(_correction(part, correction, factors[part], calibration))
    pool = pool_bytes(job)
    card = [
        _bare(allocator.POOL if pool else allocator.IDLE, memory.breakdown["allocator"]),
        _bare(allocator.CONTEXT, memory.breakdown["context"]),
    ]
    return _ordered(lines), tuple(line for line in card if line.num_bytes)


def entry_line(job: ResolvedRun, entry: Entry) -> Line:
    """One entry of a run on one GPU."""
    return _line(job, entry, _sizes(job))


def _rank_lines(job: ResolvedRun, entries: Iterable[Entry], moment: str) -> list[Line]:
    """The entries of the rank that has `moment`, with the share of what one GPU would hold."""
    assert job.layout is not None
    kinds = job.layout.rank_kinds(training_step(job))
    kind = next((kind for kind in kinds if moment.startswith(f"{kind.name}: ")), kinds[0])
    wholes: dict[Fact, tuple[ResolvedRun, Entry]] = {}
    for step, is_kept in ((kind.step, False), (kind.at_rest, True)):
        batch_size = step.batch_size // job.trainer.sequences(job.run)
        run = replace(job.run, batch_size=batch_size, seq_len=step.source_len, r=step.r)
        of_step = replace(job, model=step.model, run=run, dtypes=step.dtypes)
        moments = training_ledger(step).moments
        same_moment = moments.get(moment.removeprefix(f"{kind.name}: "), ())
        for entry in itertools.chain(same_moment, *moments.values() if is_kept else ()):
            if is_kept == (entry.part in _KEPT_PARTS):
                wholes.setdefault(entry.fact, (of_step, entry))
    lines = []
    for entry in entries:
        of_step, whole = wholes.get(entry.fact, (job, entry))
        line = _line(of_step, whole, _sizes(of_step))
        share = entry.num_bytes / whole.num_bytes if whole.num_bytes else 1.0
        if share != 1.0:
            numbers = f"{_fraction(share)} × {line.numbers or f'{whole.num_bytes} B'}"
            size = int(entry.num_bytes)
            # a strategy may keep it in another dtype
            line = replace(line, num_bytes=size, dtype="", numbers=numbers, members=())
        lines.append(line)
    return lines


def _fraction(share: float) -> str:
    """Such as 1/4 of four ranks; the padding of shards is left out."""
    parts = round(1 / share) if share else 0
    return f"1/{parts}" if parts > 1 and abs(share * parts - 1) < 1e-3 else f"{share:.4g}"


def layer_lines(job: ResolvedRun) -> tuple[Line, ...]:
    """What the layer that keeps most keeps for its own backward, largest first."""
    step = training_step(job)
    groups = [Group(tensors=layer.tensors, **layer.sized) for layer in step.layers]
    largest = max(groups, key=lambda group: int(group.num_bytes))
    sizes = _sizes(job)
    by_tensor = _by_tensor([largest])
    return _ordered(_member(job, layer_passes.SAVED, group, sizes) for group in by_tensor)


def _ordered(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(
        sorted((line for line in lines if line.num_bytes), key=lambda line: -line.num_bytes)
    )


def _sizes(job: ResolvedRun) -> dict[str, int]:
    """The numbers behind the names in shapes and counts."""
    run, model = job.run, job.model
    training = run.phase == "finetune"
    sizes = {
        "batch_size": job.num_sequences,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_hidden_layers,
        "prompt_len": run.prompt_len,
        "max_new_tokens": run.max_new_tokens,
    }
    if training:
        sizes["seq_len"] = job.row_tokens
        sizes["target_len"] = int(job.at_length(job.row_tokens)[1])
    if training or job.has_adapters:
        sizes["trained_params"] = num_trained(job)
    attentions = [attention for layer, _ in model.layers() for attention in layer.attentions]
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        values = {getattr(attention, name) for attention in attentions}
        if len(values) == 1:
            sizes[name] = values.pop()
    return sizes


_OF_SOUND = (
    ("a vision tower", "an audio encoder"),
    ("vision tower", "audio encoder"),
    ("pixels of the images", "mel frames of the clips"),
    ("pixels", "mel frames"),
    ("images", "clips"),
    ("image tokens", "audio tokens"),
    ("patches", "positions"),
    ("the tower", "the encoder"),
)
"""Words of a tower that reads images, and those of one that reads sound."""


def _in_words_of(job: ResolvedRun, line: Line) -> Line:
    """`line` in the words of what the tower of the model reads."""
    tower = job.model.tower
    if tower is None or not tower.hears:
        return line
    words = {name: getattr(line, name) for name in ("what", "shape", "why")}
    for seen, heard in _OF_SOUND:
        words = {name: text.replace(seen, heard) for name, text in words.items()}
    members = tuple(_in_words_of(job, member) for member in line.members)
    return replace(line, members=members, **words)


def _line(job: ResolvedRun, entry: Entry, sizes: Mapping[str, int]) -> Line:
    return _in_words_of(job, _as_of_images(job, entry, sizes))


def _as_of_images(job: ResolvedRun, entry: Entry, sizes: Mapping[str, int]) -> Line:
    fact = entry.fact
    if fact.part == "logits_and_loss":
        fact = replace(fact, shape=_of_stack(fact.shape, sizes, sizes.get("target_len", 0)))
    if fact is weights.LAYER_WEIGHTS:  # the ledger only sums them up
        members = _ordered(_matrices(job, fact))
    elif fact is weights.EMBEDDING_WEIGHTS:
        members = _ordered(_embeddings(job, fact))
    else:
        members = _ordered(_member(job, fact, group, sizes) for group in _by_tensor(entry.groups))
    line = replace(_bare(fact, int(entry.num_bytes)), dtype=_dtype(job, fact.dtype))
    whole = sum(member.num_bytes for member in members)
    if members and whole > line.num_bytes:  # an engine shares the model among several GPUs
        return replace(line, numbers=f"{_fraction(line.num_bytes / whole)} × {whole} B")
    if len(members) == 1:
        only = members[0]
        return replace(
            line, shape=only.shape, dtype=only.dtype, count=only.count, numbers=only.numbers
        )
    if members:
        return replace(line, members=members)
    width = getattr(job.dtypes, _width_field(job, fact.dtype), 0)
    return replace(line, numbers=_product(fact, line.num_bytes, sizes, width))


def _bare(fact: Fact, num_bytes: int) -> Line:
    return Line(
        part=fact.part,
        what=fact.what,
        shape=fact.shape,
        dtype=fact.dtype,
        count=fact.count,
        numbers="",
        num_bytes=num_bytes,
        kind=fact.kind,
        source=fact.source,
        why=fact.why,
    )


def _by_tensor(groups: Iterable[Group]) -> Iterator[Group]:
    """A group for each tensor; layers of several kinds that hold equal ones are one group."""
    by_tensor: dict[tuple[Any, ...], Group] = {}
    for group in groups:
        for tensor in group.tensors:
            key = tensor, group.where, group.tokens, group.span
            earlier = by_tensor[key].count if key in by_tensor else 0
            by_tensor[key] = replace(group, tensors=(tensor,), count=earlier + group.count)
    yield from by_tensor.values()


def _of_stack(shape: str, sizes: Mapping[str, int], length: int) -> str:
    """`shape` with the name of the setting that `length` is of, an encoder's or its decoder's."""
    is_target = length == sizes.get("target_len") != sizes.get("seq_len")
    return shape.replace("seq_len", "target_len") if is_target else shape


def _member(job: ResolvedRun, fact: Fact, group: Group, sizes: Mapping[str, int]) -> Line:
    """One tensor, of all its layers together."""
    (tensor,) = group.tensors
    width = tensor.element_bytes
    numbers = ""
    shape = _of_stack(tensor.shape, sizes, int(group.span))
    of_both = shape != tensor.shape and bool(tensor.constant)  # ids of one, labels of the other
    if of_both:
        shape = f"{tensor.shape}, {shape}"
    if width and not of_both:
        seq_len = int(group.span)  # of images: patches of each
        sequences = int(group.tokens) // max(1, seq_len)
        dims: list[int] = [group.count] if group.count > 1 else []
        if tensor.per_token_pair:
            pair = int(tensor.per_token_pair) // width
            dims += [sequences, *([pair] if pair > 1 else []), seq_len, seq_len]
        elif tensor.per_token:
            dims += [sequences, seq_len, int(tensor.per_token) // width]
        else:
            dims.append(int(tensor.constant) // width)
        numbers = _times(dims, width)
    where = f" ({group.where})" if group.where else ""
    return Line(
        part=fact.part,
        what=tensor.what + where,
        shape=shape,
        dtype=_width_name(job, width) if width else "mixed",
        count=str(group.count),
        numbers=numbers,
        num_bytes=int(group.num_bytes),
        kind=fact.kind,
        source=fact.source,
        why=fact.why,
    )


def _matrices(job: ResolvedRun, fact: Fact) -> Iterator[Line]:
    """The weights of the layers by the name of the matrix."""
    dtypes = job.dtypes
    dtype = _dtype(job, "base_bytes")
    matrices: Counter[Linear] = Counter()
    others: Counter[int] = Counter()
    for layers in job.model.groups:
        count = 1 if layers.shared else layers.count
        linears = layers.layer.linears
        others[layers.layer.num_params - sum(linear.num_params for linear in linears)] += count
        for linear in linears:
            matrices[linear] += count
    for linear, count in matrices.items():
        size = weights.linear_bytes(linear, dtypes)
        dims = [linear.count, linear.out_features, linear.in_features]
        factors = [dim for dim in (count, *dims) if dim > 1]
        bits = 8 * size / linear.num_weights
        width = f"{bits / 8:.0f} B" if bits % 8 == 0 else f"{bits:.3f} bit"
        yield replace(
            _bare(fact, count * size),
            what=linear.name,
            shape=f"{dims[1:]}" if linear.count == 1 else f"{dims}",
            dtype=dtypes.quant if is_quantised(linear, dtypes) else dtype,
            count=str(count),
            numbers=" × ".join([*map(str, factors), width]),
        )
    for num_params, count in others.items():
        yield replace(
            _bare(fact, count * num_params * dtypes.base_bytes),
            what="norms and bare parameters",
            shape=f"[{num_params}]",
            dtype=dtype,
            count=str(count),
            numbers=_times([count, num_params], dtypes.base_bytes),
        )


def _embeddings(job: ResolvedRun, fact: Fact) -> Iterator[Line]:
    """The tables, and the head where it is not one of them."""
    model = job.model
    tables = [table for table in model.embeddings if table.kind != "buffer"]
    head, training = model.head, job.run.phase == "finetune"
    hosted = job.trainer.hosts(job.run) if training else frozenset()
    if model.head_tied and not (head is not None and {tables[0].name, head.name} <= hosted):
        hosted = frozenset()
    tables = [table for table in tables if table.name not in hosted]
    shapes = [(table.name, [table.rows, table.width], table.num_params) for table in tables]
    if head is not None and quantises_head(head, job.dtypes):
        head = None  # which has an entry of its own
    if head is not None and not model.head_tied and head.name not in hosted:
        shapes.append((head.name, [head.out_features, head.in_features], head.num_params))
    elif head is not None and head.bias:
        shapes.append((f"{head.name}: bias", [head.out_features], head.out_features))
    for name, dims, count in shapes:
        width = job.dtypes.embedding_bytes
        if head is not None and name.startswith(head.name):
            width = job.dtypes.head_bytes
        yield replace(
            _bare(fact, count * width),
            what=name,
            shape=f"{dims}",
            count="1",
            dtype=_width_name(job, width),
            numbers=_times(dims if math.prod(dims) == count else [count], width),
        )


def _product(fact: Fact, num_bytes: int, sizes: Mapping[str, int], width: int) -> str:
    """Count, dimensions and bytes per element, where these are whole numbers."""
    dims = [_value(name, sizes) for name in fact.shape.strip("[]").split(", ")]
    if not num_bytes or None in dims or 0 in dims:  # 0: a size that this model does not have
        return ""
    lengths = [dim for dim in dims if dim is not None]
    counts = [_value(name, sizes) for name in fact.count.split(" x ")]
    several = [count for count in counts if count is not None and count > 1]
    for factors in ([*several, *lengths], lengths):  # the count is that of the usual dtypes
        element_bytes, remainder = divmod(num_bytes, math.prod(factors))
        if remainder or not element_bytes:
            continue
        if width and element_bytes > width and element_bytes % width == 0:  # several such tensors
            return _times([element_bytes // width, *factors], width)
        return _times(factors, element_bytes)
    return ""


def _value(term: str, sizes: Mapping[str, int]) -> int | None:
    """A name, a number, or a sum or difference of names."""
    total, sign = 0, 1
    for word in term.split():
        if word in "+-":
            sign = 1 if word == "+" else -1
            continue
        value = sizes.get(word, int(word) if word.isdigit() else None)
        if value is None:
            return None
        total += sign * value
    return total


def _times(dims: Iterable[int], width: int) -> str:
    return " × ".join([*map(str, dims), f"{width} B"])


def _width_field(job: ResolvedRun, dtype: str) -> str:
    """The field of `Dtypes` that holds the width of a fact's dtype; "" where none does."""
    if dtype == "of the optimizer" and "8bit" in job.run.optimizer:
        return ""
    if dtype.startswith("of the "):
        return "base_bytes" if job.dtypes.trains_base else "adapter_bytes"
    if dtype == "quant" and job.dtypes.quant == "none":
        return "base_bytes"
    return dtype if dtype.endswith("_bytes") else ""


def _dtype(job: ResolvedRun, dtype: str) -> str:
    field = _width_field(job, dtype)
    if field:
        return _width_name(job, getattr(job.dtypes, field))
    return {"quant": job.dtypes.quant, "of the optimizer": "8 bit"}.get(dtype, dtype)


def _width_name(job: ResolvedRun, width: int) -> str:
    if width == 2 and job.run.precision.startswith("fp16"):
        return "fp16"
    return _DTYPES.get(width, f"{width} B")


def _correction(part: str, num_bytes: int, factor: float, calibration: Calibration) -> Line:
    return Line(
        part=part,
        what=f"correction of {part}",
        shape=f"{factor - 1:+.2%} of what is counted",
        dtype="bytes",
        count="1",
        numbers="",
        num_bytes=num_bytes,
        kind="fitted",
        source=f"calibration {calibration.gpu}: {calibration.memory.num_runs} memory runs",
        why="measured runs differ from what the ledger counts",
    )
