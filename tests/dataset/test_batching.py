"""Token lengths to batches: what each collator makes of them, and what a training sees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.dataset import TokenLengths, evaluation_widths, workload
from whichlora.dataset.batching import batches, best_fit_decreasing, length_grouped
from whichlora.dataset.sources import CountedDataset
from whichlora.errors import ConfigError
from whichlora.spec.plan import Collator
from whichlora.trainers import Repeats

lengths_of_sequences = st.lists(st.integers(1, 4096), min_size=1, max_size=200)


def token_lengths(*train: int) -> TokenLengths:
    return TokenLengths(lengths={"train": train}, max_length=4096, method="test")


@given(
    lengths=lengths_of_sequences,
    batch_size=st.integers(1, 64),
    collator=st.sampled_from(["longest", "grouped", "fixed"]),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 5),
)
def test_batches_hold_every_sequence_once_and_are_as_wide_as_the_longest(
    lengths: list[int], batch_size: int, collator: Collator, seed: int, epoch: int
) -> None:
    def made() -> Any:
        return batches(
            lengths, collator, batch_size=batch_size, seq_len=4096, seed=seed, epoch=epoch
        )

    widths, sizes = made().T
    assert sizes.sum() == len(lengths)
    assert sizes[:-1].tolist() == [batch_size] * (len(sizes) - 1)
    assert widths.max() == (4096 if collator == "fixed" else max(lengths))
    assert sum(lengths) <= (widths * sizes).sum()
    assert made().tolist() == made().tolist()


@given(lengths=lengths_of_sequences, seq_len=st.integers(1, 4096))
def test_best_fit_packs_every_token_into_few_rows(lengths: list[int], seq_len: int) -> None:
    rows = best_fit_decreasing(np.array(lengths), seq_len)
    total = sum(min(length, seq_len) for length in lengths)
    assert rows.sum() == total
    assert max(rows) <= seq_len
    # never two rows that fit into one
    assert len(rows) < 2 or sum(sorted(rows)[:2]) > seq_len


def test_best_fit_leaves_the_least_room() -> None:
    rows = best_fit_decreasing(np.array([5, 4, 3, 3, 2, 9]), 8)  # 9 is cut
    assert sorted(rows.tolist()) == [2, 4 + 3, 5 + 3, 8]


def test_each_thousand_sequences_are_packed_on_their_own() -> None:
    # six and four fill a row of ten, but a thousand sixes come before the first four
    lengths = np.array([6] * 1000 + [4] * 1000)
    assert len(best_fit_decreasing(lengths, 10)) == 1000 + 500
    assert len(best_fit_decreasing(np.array([6, 4] * 1000), 10)) == 1000


def test_joined_texts_are_cut_into_whole_blocks() -> None:
    table = batches([700, 900, 500], "packed", batch_size=2, seq_len=512)
    assert table.tolist() == [[512, 2], [512, 2]]
    with pytest.raises(ConfigError, match="collator: packed fills no block of 512 tokens"):
        batches([100], "packed", batch_size=1, seq_len=512)


def test_batches_of_similar_lengths_pad_less_and_begin_with_the_longest() -> None:
    lengths = [1 + (37 * n) % 997 for n in range(997)]
    padded = {}
    for collator in ("longest", "grouped"):
        table = batches(lengths, collator, batch_size=8, seq_len=4096)
        padded[collator] = int(table.prod(axis=1).sum())
    assert padded["grouped"] < 0.7 * padded["longest"]
    assert batches(lengths, "grouped", batch_size=8, seq_len=4096)[0][0] == 997


def test_epochs_are_shuffled_differently() -> None:
    first, second = (
        batches(range(1, 200), "longest", batch_size=4, seq_len=512, epoch=epoch).tolist()
        for epoch in (0, 1)
    )
    assert first != second


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "epochs", "steps"),
    [(1, 1, 1, 10), (4, 1, 1, 3), (4, 2, 1, 2), (4, 2, 3, 6), (4, 8, 2, 2), (1, 1, 0.25, 3)],
)
def test_steps_are_counted_as_the_trainer_counts_them(
    batch_size: int, accumulation: int, epochs: float, steps: int
) -> None:
    load = workload(
        token_lengths(*[1] * 10),
        collator="longest",
        batch_size=batch_size,
        seq_len=8,
        accumulation=accumulation,
        epochs=epochs,
    )
    assert load.num_steps == steps


def test_several_gpus_wait_for_the_widest_of_the_batches_that_they_compute_at_once() -> None:
    data = token_lengths(*range(1, 101))
    alone, four = (
        workload(data, batch_size=2, seq_len=128, epochs=2, at_once=n, accumulation=2)
        for n in (1, 4)
    )
    # 50 batches are 13 rounds of 4 GPUs, of which an optimizer step has two
    assert (alone.num_batches, four.num_batches) == (100, 26)
    assert (alone.num_steps, four.num_steps) == (50, 14)
    assert four.padded_tokens == alone.padded_tokens
    assert four.real_tokens == alone.real_tokens
    assert sum(four.widths.values()) == pytest.approx(26)
    waited = sum(width * count for width, count in four.widths.items())
    assert waited > sum(width * count for width, count in alone.widths.items()) / 4 * 1.1
    assert four.longest == alone.longest


def test_a_workload_counts_real_and_padded_tokens_of_all_epochs() -> None:
    data = token_lengths(*range(1, 101))
    for collator in ("longest", "grouped", "fixed", "packed", "packed-bfd"):
        load = workload(data, collator=collator, batch_size=4, seq_len=128, epochs=2)
        seen = sum(width * count for width, count in load.widths.items()) * 4
        assert seen == pytest.approx(load.padded_tokens, rel=0.02), collator
        real = 2 * (5050 // 128 * 128 if collator == "packed" else 5050)
        assert load.real_tokens == real, collator
        assert (load.padding_fraction == 0) == (collator == "packed")
        assert load.is_padded == (collator != "packed")
        assert load.longest <= 128


def test_a_batch_of_one_carries_padding_only_where_rows_are_filled_up() -> None:
    data = token_lengths(*range(1, 101))
    alone = {"batch_size": 1, "seq_len": 128}
    assert not workload(data, collator="longest", **alone).is_padded
    assert workload(data, collator="fixed", **alone).is_padded
    assert workload(data, collator="longest", sequences=2, **alone).is_padded
    written = Repeats(answers=8, per_row=4, micro_batches=2)
    assert workload(data, collator="longest", repeats=written, **alone).is_padded
    assert not workload(token_lengths(*[64] * 9), batch_size=4, seq_len=64).is_padded


def test_a_part_of_an_epoch_sees_a_part_of_the_tokens() -> None:
    data = token_lengths(*[64] * 100)
    half = workload(data, collator="longest", batch_size=2, seq_len=64, epochs=0.5)
    assert (half.num_steps, half.num_batches, half.real_tokens) == (25, 25, 25 * 2 * 64)


@pytest.mark.oracle
@pytest.mark.parametrize("num_sequences", [3, 40, 997])
def test_lengths_are_grouped_as_transformers_groups_them(
    num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    trainer_pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    lengths = np.random.default_rng(3).integers(1, 500, num_sequences)
    order = np.random.default_rng(5).permutation(num_sequences)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: torch.from_numpy(order))
    theirs = trainer_pt_utils.get_length_grouped_indices(lengths.tolist(), 8)
    ours = length_grouped(lengths, 8, np.random.default_rng(5))
    assert ours.tolist() == lengths[theirs].tolist()


@pytest.mark.oracle
@pytest.mark.parametrize("num_sequences", [1, 40, 2345])
def test_sequences_are_packed_as_trl_packs_them(num_sequences: int) -> None:
    datasets = pytest.importorskip("datasets")
    data_utils = pytest.importorskip("trl.data_utils")
    lengths = np.random.default_rng(7).integers(1, 700, num_sequences)
    data = datasets.Dataset.from_dict({"input_ids": [[0] * int(length) for length in lengths]})
    theirs = data_utils.pack_dataset(data, seq_length=512, strategy="bfd")
    ours = best_fit_decreasing(lengths, 512)
    assert sorted(ours.tolist()) == sorted(map(len, theirs["input_ids"]))


def test_assumed_lengths_say_what_they_leave_open() -> None:
    dataset = CountedDataset(num_samples=4000, mean_tokens=200)
    load = workload(dataset.lengths(4096), batch_size=8)
    assert load.longest == 4096  # the longest batch is as long as a sequence may be
    assert 400 < load.least_longest < 700  # of lengths that are spread little
    assert 0.2 < load.deviation < 0.35
    alternatives = dataset.lengths(4096).alternatives
    narrow, wide = (workload(each, batch_size=8).padded_tokens for each in alternatives)
    reach = math.exp(1.645 * load.deviation)
    assert load.padded_tokens / reach <= narrow * 1.001
    assert wide <= load.padded_tokens * reach * 1.001
    assert load.padding_fraction > 0.4  # equal lengths would have none


def test_known_lengths_leave_nothing_open() -> None:
    load = workload(token_lengths(10, 20, 30, 40), batch_size=2)
    assert (load.longest, load.least_longest, load.deviation) == (40, 40, 0.0)


def test_packed_batches_hold_the_same_tokens_however_these_are_spread() -> None:
    lengths = CountedDataset(num_samples=4000, mean_tokens=200).lengths(10**9)
    load = workload(lengths, batch_size=8, collator="packed", seq_len=1024)
    assert (load.longest, load.least_longest) == (1024, 1024)
    assert load.deviation < 0.01


@pytest.mark.parametrize(("rows", "steps"), [(1, 1.0), (3, 1.0), (16, 1.0), (24, 1.5)])
def test_a_batch_that_takes_all_rows_and_more_counts_as_a_whole_step(
    rows: int, steps: float
) -> None:
    load = workload(token_lengths(*[20] * rows), batch_size=16)
    assert sum(load.widths.values()) == pytest.approx(steps)
    assert load.num_steps == math.ceil(rows / 16)
    assert load.padded_tokens == 20 * rows
    splits = {"train": (9,), "validation": (20,) * rows}
    lengths = TokenLengths(lengths=splits, max_length=64, method="test")
    widths = evaluation_widths(lengths, batch_size=16, collator="longest", seq_len=64)
    assert sum(widths.values()) == pytest.approx(steps)
