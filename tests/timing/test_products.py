"""Tiles and waves of matrix products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing import model as timing
from whichlora.timing.products import LAST_WAVE_LOST, idle_flops

MULTIPROCESSORS = 100


def test_whole_waves_of_whole_tiles_leave_nobody_idle() -> None:
    assert idle_flops(1280, 1280, 64, MULTIPROCESSORS) == 0  # 10 x 10 tiles


def test_idle_flops_of_a_last_wave_and_of_an_edge_by_hand() -> None:
    # 11 x 10 tiles: 90 multiprocessors have none in the second wave
    lost = LAST_WAVE_LOST * 90 * 128 * 128
    assert idle_flops(1408, 1280, 64, MULTIPROCESSORS) == pytest.approx(2 * 64 * lost)
    # one row more than 9 tiles have: 10 x 10 tiles, of which a row is used
    assert idle_flops(9 * 128 + 1, 1280, 64, MULTIPROCESSORS) == 2 * 64 * 127 * 1280


def test_tiles_of_few_rows_are_as_high() -> None:
    # 100 tiles of 5 rows
    assert idle_flops(5, 12800, 64, MULTIPROCESSORS) == 0


def test_nothing_is_idle_where_the_multiprocessors_are_not_known() -> None:
    assert idle_flops(77, 333, 64, None) == 0


@given(rows=st.integers(1, 5000), columns=st.integers(1, 5000), count=st.integers(1, 8))
def test_a_row_more_never_takes_less(rows: int, columns: int, count: int) -> None:
    def computed(rows: int) -> float:
        useful = 2 * 64 * count * rows * columns
        return useful + float(idle_flops(rows, columns, 64, MULTIPROCESSORS, count=count))

    assert computed(rows) >= 2 * 64 * count * rows * columns
    assert computed(rows + 1) >= computed(rows)


def test_arrays_are_counted_as_plain_numbers_are() -> None:
    rows = np.array([1.0, 127.0, 128.0, 129.0, 4096.0])
    plain = [idle_flops(int(value), 4096, 64, MULTIPROCESSORS) for value in rows]
    assert idle_flops(rows, 4096, 64, MULTIPROCESSORS) == pytest.approx(plain)


def test_a_device_without_known_multiprocessors_is_predicted_faster() -> None:
    model = load_model("llama-3.1-8b")
    run = RunConfig(model=model.name, method="lora", batch_size=1, seq_len=300)
    gpu = find_gpu("a100-sxm-80gb")
    known, unknown = (
        step_features(resolve(model, run, device))["products"]
        for device in (gpu, replace(gpu, num_multiprocessors=None))
    )
    assert 1.2 < known / unknown < 1.5  # 300 rows fill 2.3 of 3 tiles


def test_products_in_fp32_have_no_waves() -> None:
    gpu = find_gpu("a100-sxm-80gb")
    assert timing.tiled_multiprocessors(gpu, "bf16") == 108
    assert timing.tiled_multiprocessors(gpu, "fp32") is None
