"""Sizes as numbers per token, per rank, per sequence and so on: sums, maxima and their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import ge, itemgetter
from typing import NamedTuple

from whichlora.spec.numeric import Count, ceil_div, floor_div, largest, num_combinations


class LinearForm(NamedTuple):
    """Bytes or elements: so many per token, per pair of tokens (tokens times span), and so on.

    Args:
        where_many_rows: bytes that are there only above `fused_rows` tokens.
        per_group: for every `group_size` tokens of each sequence, a part of them left out.
        per_chunk_group: so for every one of its chunks.
        per_span: for every token of one sequence, however many sequences there are.
        chunk_size: how many tokens a chunk has; 0 where there are none.
        fused_rows: as of `spec.dtypes.fused_rows`; 0 where no term asks.
    """

    per_token: int = 0
    per_pair: int = 0
    constant: int = 0
    per_rank_token: int = 0
    per_rank: int = 0
    per_span_squared: int = 0
    where_many_rows: int = 0
    per_chunk: int = 0
    per_sequence: int = 0
    per_rank_sequence: int = 0
    per_group: int = 0
    per_chunk_group: int = 0
    per_span: int = 0
    chunk_size: int = 0
    fused_rows: int = 0
    group_size: int = 0


NOTHING = LinearForm()


CHUNK = 64  # tokens that a gated delta net takes at once, the last ones padded


COMPARED_FROM = 1 << 13  # combinations of sizes; of fewer, evaluating forms takes less time


def per_token(count: int) -> LinearForm:
    return LinearForm(per_token=count)


def per_pair(count: int) -> LinearForm:
    return LinearForm(per_pair=count)


def constant(count: int) -> LinearForm:
    return LinearForm(constant=count)


def per_rank_token(count: int) -> LinearForm:
    return LinearForm(per_rank_token=count)


def per_rank(count: int) -> LinearForm:
    return LinearForm(per_rank=count)


def per_span_squared(count: int) -> LinearForm:
    return LinearForm(per_span_squared=count)


def per_span(count: int) -> LinearForm:
    return LinearForm(per_span=count)


def where_many_rows(count: int, fused_rows: int) -> LinearForm:
    """Bytes that are there only above so many rows, the same number in all of one layer."""
    return LinearForm(where_many_rows=count, fused_rows=fused_rows)


def per_chunk(count: int, size: int = CHUNK) -> LinearForm:
    """Per `size` tokens of one sequence, a part of them counted as a whole.

    The chunks of one layer are all of one size.
    """
    return LinearForm(per_chunk=count, chunk_size=size)


def per_sequence(count: int) -> LinearForm:
    return LinearForm(per_sequence=count)


def per_rank_sequence(count: int) -> LinearForm:
    return LinearForm(per_rank_sequence=count)


def per_group(count: int, size: int) -> LinearForm:
    """Per `size` tokens of one sequence, a part of them left out; one size in all of a layer."""
    return LinearForm(per_group=count, group_size=size)


def per_chunk_group(count: int, *, chunk: int, group: int) -> LinearForm:
    """Per chunk of `chunk` tokens and `group` tokens of one sequence, as of both."""
    return LinearForm(per_chunk_group=count, chunk_size=chunk, group_size=group)


def scaled(form: LinearForm, factor: int) -> LinearForm:
    a, b, c, d, e, f, g, h, i, j, m, n, s, *sizes = form
    k = factor
    return LinearForm(
        *(a * k, b * k, c * k, d * k, e * k, f * k, g * k, h * k, i * k, j * k, m * k, n * k),
        s * k,
        *sizes,
    )


def plus(first: LinearForm, second: LinearForm) -> LinearForm:
    a, b, c, d, e, f, g, h, i, j, m, n, spans, chunk, fused, group = first
    p, q, r, s, t, u, v, w, x, y, z, o, more, other_chunk, other_fused, other_group = second
    return LinearForm(
        *(a + p, b + q, c + r, d + s, e + t, f + u, g + v, h + w, i + x, j + y, m + z, n + o),
        spans + more,
        chunk or other_chunk,
        fused or other_fused,
        group or other_group,
    )


def minus(first: LinearForm, second: LinearForm) -> LinearForm:
    return plus(first, scaled(second, -1))


def total(forms: Iterable[LinearForm]) -> LinearForm:
    result = NOTHING
    for form in forms:
        result = plus(result, form)
    return result


_TERM_BITS = 128  # of a packed form; a config's largest size has 30, a product of three 90


_NUM_SIZES = 3  # the last fields are no terms


_SHIFTS = tuple(_TERM_BITS * place for place in reversed(range(len(NOTHING) - _NUM_SIZES)))


@lru_cache(maxsize=4096)
def packed(form: LinearForm) -> int:
    """All terms, without the size of chunks and the fused rows, in one integer.

    A pass over a layer adds up thousands of forms: the sum of packed forms is one sum of integers.
    """
    return sum(term << shift for term, shift in zip(form, _SHIFTS, strict=False))


_SIGN = 1 << (_TERM_BITS - 1)


_SIGNS = sum(_SIGN << shift for shift in _SHIFTS)


def unpacked(number: int, chunk_size: int, fused_rows: int, group_size: int = 0) -> LinearForm:
    """The form that `packed` made a number of."""
    number += _SIGNS  # so that no term is negative
    mask = (1 << _TERM_BITS) - 1
    terms = [(number >> shift & mask) - _SIGN for shift in _SHIFTS]
    return LinearForm._make([*terms, chunk_size, fused_rows, group_size])


_IN_SEQUENCE = ("per_chunk", "per_sequence", "per_rank_sequence", "per_group", "per_chunk_group")


def has_sequences(form: LinearForm) -> bool:
    """Whether anything in it is of each sequence."""
    return any(form[7:12])


def without_sequences(form: LinearForm) -> LinearForm:
    """`form` without its terms per chunk, group and sequence."""
    return form._replace(**dict.fromkeys(_IN_SEQUENCE, 0), chunk_size=0, group_size=0)


def evaluate(form: LinearForm, *, tokens: Count, span: Count, r: Count) -> Count:
    """The number, or array of numbers, that `form` stands for."""
    slope: Count = form.per_token
    if form.per_pair:
        slope = slope + form.per_pair * span
    if form.per_rank_token:
        slope = slope + form.per_rank_token * r
    result: Count = tokens * slope
    if form.constant or form.per_rank:
        result = result + (form.constant + form.per_rank * r)
    if form.per_span_squared:
        result = result + form.per_span_squared * span * span
    if form.per_span:
        result = result + form.per_span * span
    if form.where_many_rows:
        result = result + form.where_many_rows * (tokens > form.fused_rows)
    if has_sequences(form):
        result = result + floor_div(tokens, span) * in_sequence(form, span=span, r=r)
    return result


def in_sequence(form: LinearForm, *, span: Count, r: Count) -> Count:
    """What `form` has for each sequence, whatever the number of its tokens."""
    result: Count = form.per_sequence + form.per_chunk * chunks(span, form.chunk_size)
    if form.group_size:
        groups = floor_div(span, form.group_size)
        of_chunks = form.per_chunk_group * chunks(span, form.chunk_size)
        result = result + (form.per_group + of_chunks) * groups
    return result + form.per_rank_sequence * r if form.per_rank_sequence else result


def chunks(span: Count, size: int) -> Count:
    """How many chunks of `size` tokens a sequence of `span` has."""
    return ceil_div(span, max(1, size))


def most(forms: Iterable[LinearForm], *, tokens: Count, span: Count, r: Count) -> Count:
    forms = tuple(forms)
    if num_combinations(tokens, span, r) > COMPARED_FROM:
        forms = _largest_somewhere(forms, tokens=tokens, span=span, r=r)
    return largest(*(evaluate(form, tokens=tokens, span=span, r=r) for form in forms), 0 * tokens)


def _largest_somewhere(
    forms: tuple[LinearForm, ...], *, tokens: Count, span: Count, r: Count
) -> tuple[LinearForm, ...]:
    """Those of `forms` that another does not reach for all sizes of these arrays.

    A difference of two forms is linear in each of tokens, span, rank, the span's square and the
    switch at many rows. So it is negative nowhere if it is not at the ends of their ranges.
    """
    import numpy as np

    if any(has_sequences(form) or form.per_span for form in forms):
        return forms
    few, many = np.min(tokens), np.max(tokens)
    fused_rows = max((form.fused_rows for form in forms), default=0)
    short, long = np.min(span), np.max(span)
    ends = np.meshgrid(
        (few, many),
        (short, long),
        (np.min(r), np.max(r)),
        (short**2, long**2),
        (few > fused_rows, many > fused_rows),
    )
    n, length, rank, squared, is_many = (np.ravel(values).astype(np.float64) for values in ends)
    terms = np.stack([n, n * length, np.ones_like(n), n * rank, rank, squared, is_many])
    num_bytes = np.array([form[: len(terms)] for form in forms], dtype=np.float64) @ terms
    order = np.argsort(-num_bytes.sum(axis=1), kind="stable")
    num_bytes = num_bytes[order]
    reaches = (num_bytes[:, None] >= num_bytes).all(axis=-1)
    is_reached = np.triu(reaches, 1).any(axis=0)
    return tuple(forms[position] for position in order[~is_reached].tolist())


def maximal(forms: Iterable[LinearForm]) -> tuple[LinearForm, ...]:
    """Forms of which one is the largest whatever the sizes are.

    Left out are those that another form reaches in every term, and those between two forms: bytes
    are linear in each term, so that one of the two has as many.
    """
    # backward, a layer after another frees what it saved per token and leaves its gradients: a
    # loop over 512 experts makes tens of thousands of forms, most of them on such lines
    ends: Iterable[LinearForm] = set(forms)
    for gradients in ("per_rank", "constant"):
        ends = _upper_hulls(ends, LinearForm._fields.index(gradients))
    candidates = sorted(ends, reverse=True)
    varying = [
        term for term, values in enumerate(zip(*candidates, strict=True)) if len(set(values)) > 1
    ]
    if len(varying) < 2:
        return tuple(candidates[:1])
    maxima: list[LinearForm] = []
    terms_of_maxima: list[tuple[int, ...]] = []
    compared = itemgetter(*varying)
    for form in candidates:
        terms = compared(form)
        for larger in terms_of_maxima:
            if all(map(ge, larger, terms)):
                break
        else:
            maxima.append(form)
            terms_of_maxima.append(terms)
    return tuple(maxima)


def _upper_hulls(forms: Iterable[LinearForm], term: int) -> Iterator[LinearForm]:
    """Of forms that differ in `per_token` and `term` alone, those that can be the largest.

    Source: Andrew 1979, doi:10.1016/0020-0190(79)90072-3: the upper hull of points in a plane.
    """
    planes: dict[tuple[int, ...], list[tuple[int, int, LinearForm]]] = {}
    for form in forms:
        planes.setdefault(form[1:term] + form[term + 1 :], []).append((form[0], form[term], form))
    for points in planes.values():
        hull: list[tuple[int, int, LinearForm]] = []
        for point in sorted(points, reverse=True):
            x, y, _ = point
            if hull and y <= hull[-1][1]:
                continue
            while len(hull) > 1:
                (x1, y1, _), (x2, y2, _) = hull[-2:]
                if (x1 - x2) * (y - y2) < (y2 - y1) * (x2 - x):
                    break
                hull.pop()
            hull.append(point)
        yield from (form for *_, form in hull)
