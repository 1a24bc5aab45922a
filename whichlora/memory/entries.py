"""Lines of the ledger: tensors, and what is known of them whatever the run.

Evaluating a ledger makes no text: a `Fact` is written once, an `Entry` joins it to bytes, and
names of dimensions turn into numbers only where somebody asks for an explanation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from whichlora.spec.numeric import Count

Kind = Literal["exact", "lower bound", "upper bound", "estimate", "fitted"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or equal ones, of one layer or of the run.

    Args:
        per_token: bytes per token of the batch.
        per_token_pair: bytes per token and per token it attends to (quadratic attention).
        constant: bytes whatever the number of tokens.
        dims: its dimensions beside batch_size and seq_len, in our names.
        element_bytes: width of one element; 0 where the line has tensors of several widths.
    """

    what: str
    per_token: Count = 0
    per_token_pair: Count = 0
    constant: Count = 0
    dims: str = ""
    element_bytes: int = 0

    @property
    def shape(self) -> str:
        """Such as "[batch_size, seq_len, hidden_size]"."""
        return _shape(self.dims, paired=bool(self.per_token_pair), sized=bool(self.per_token))


def per_token(name: str, element_bytes: int, width: Count, dims: str) -> Tensor:
    """A tensor of `width` elements per token."""
    return Tensor(name, element_bytes * width, dims=dims, element_bytes=element_bytes)


def _shape(dims: str, *, paired: bool, sized: bool) -> str:
    if paired:
        names = ["batch_size", dims, "seq_len", "seq_len"]
    elif sized:
        names = ["batch_size", "seq_len", dims]
    else:
        names = [dims]
    return f"[{', '.join(name for name in names if name)}]"


def tensor_bytes(tensors: Iterable[Tensor], *, tokens: Count, span: Count) -> Count:
    """Bytes of `tensors` for `tokens` tokens that each attend over `span` tokens.

    Kind: exact. Source: shape times width of the dtype, of each tensor.
    """
    per_token: Count = 0
    per_token_pair: Count = 0
    constant: Count = 0
    for tensor in tensors:
        per_token = per_token + tensor.per_token
        per_token_pair = per_token_pair + tensor.per_token_pair
        constant = constant + tensor.constant
    return tokens * (per_token + per_token_pair * span) + constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors that each of `count` equal layers holds, for `tokens` that attend over `span`."""

    tensors: tuple[Tensor, ...]
    tokens: Count
    span: Count
    where: str = ""
    count: int = 1

    @property
    def num_bytes(self) -> Count:
        return self.count * tensor_bytes(self.tensors, tokens=self.tokens, span=self.span)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What an entry is in every run.

    Args:
        part: which part of the breakdown it counts to.
        what: the tensor, or the group of tensors.
        shape: of one tensor, in our names; of a group that of its members.
        dtype: a dtype, or the field of `Stack` that holds its width.
        count: how many there are, as a number or in our names.
        why: why it is alive at this moment.
        kind: how far its bytes can be trusted.
        source: the library function or the paper that it was read from.
    """

    part: str
    what: str
    shape: str
    dtype: str
    why: str
    source: str
    kind: Kind = "exact"
    count: str = "1"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, or one group of tensors, alive at a moment.

    Args:
        groups: its members where they are listed; their bytes add up to `num_bytes`.
    """

    fact: Fact
    num_bytes: Count
    groups: tuple[Group, ...] = ()

    @property
    def part(self) -> str:
        return self.fact.part

    @property
    def what(self) -> str:
        return self.fact.what


def listed(fact: Fact, *groups: Group) -> Entry:
    """The entry whose bytes are those of its members."""
    total: Count = 0
    for group in groups:
        total = total + group.num_bytes
    return Entry(fact, total, groups)
