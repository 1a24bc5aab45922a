"""The quantised key-value cache, against recorded runs of the libraries and by its own rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devices import CPU
from hypothesis import given
from hypothesis import strategies as st

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.memory import kv_cache, quantised_cache
from whichlora.memory.entries import Fact
from whichlora.memory.inference import inference_ledger
from whichlora.predict.quantities import generation, ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import CacheBackend, CacheFormat, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model
from whichlora.timing.cache_work import expanding, storing
from whichlora.timing.serving_work import conversion

RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden/quantised_cache.json").read_text("utf-8")
)
GPU = find_gpu("a100-sxm-80gb")
LLAMA = "meta-llama/Meta-Llama-3-8B"


def model(name: str) -> ModelSpec:
    found = find_model(name)
    assert found is not None
    return build(found.config, name=name)


def job(name: str = LLAMA, gpu: GpuSpec = GPU, **settings: Any) -> ResolvedRun:
    run = RunConfig(model=name, phase="inference", **({"kv_cache": "quantized"} | settings))
    return resolve(model(name), run, gpu)


def entry(one: ResolvedRun, moment: str, fact: Fact) -> int:
    return int(sum(each.num_bytes for each in ledger(one).moments[moment] if each.fact is fact))


@pytest.mark.sampled(40)
@pytest.mark.parametrize("row", RECORDED["rows"], ids=lambda row: " ".join(map(str, row.values())))
def test_a_generation_peaks_where_the_libraries_did(row: dict[str, Any]) -> None:
    settings = {name: value for name, value in row.items() if name != "family"}
    measured = settings.pop("peak_allocated_bytes")
    run = RunConfig(
        model=row["family"],
        phase="inference",
        kv_cache="quantized",
        batch_size=RECORDED["batch_size"],
        **settings,
    )
    spec = build(RECORDED["configs"][row["family"]], name=row["family"])
    predicted = ledger(resolve(spec, run, CPU)).peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=RECORDED["tolerance"])


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({}, 4.5),  # a scale and a zero of 16 bits for 64 elements
        ({"cache_backend": "hqq"}, 4.5),
        ({"cache_nbits": 2}, 2.5),
        ({"cache_group_size": 32}, 5.0),
        ({"cache_backend": "fp8"}, 8.0),
        ({"precision": "fp32"}, 5.0),
    ],
    ids=str,
)
def test_an_element_of_a_long_prompt_takes_so_many_bits(
    settings: dict[str, Any], bits: float
) -> None:
    one = job(prompt_len=2**16, max_new_tokens=1, **settings)
    stored = entry(one, "first_logits", quantised_cache.QUANTISED_CACHE)
    elements = 2 * 32 * 8 * 128 * 2**16
    assert 8 * stored / elements == pytest.approx(bits, rel=1e-4)


def test_new_tokens_gather_in_full_width_until_all_are_quantised_anew() -> None:
    of_token = 2 * 32 * 8 * 128 * 2
    for steps, fresh in ((0, 0), (1, 1), (127, 127), (128, 0), (129, 1), (300, 44)):
        one = job(prompt_len=512, max_new_tokens=steps + 1)
        assert entry(one, "decode", quantised_cache.FRESH_CACHE) == fresh * of_token
        kept = 2 * 32 * 8 * 128 * (512 + steps - fresh)
        assert entry(one, "decode", quantised_cache.QUANTISED_CACHE) == kept // 2 + kept // 64 * 4


def test_a_step_expands_keys_and_values_of_one_layer_beside_what_attention_reads() -> None:
    one = job(prompt_len=1000, max_new_tokens=2)
    of_layer = 2 * 8 * 128 * 2
    assert entry(one, "decode", quantised_cache.EXPANDED) == of_layer * (1000 + 1001)


def test_a_prompt_alone_expands_nothing() -> None:
    for backend in ("quanto", "fp8"):
        one = job(max_new_tokens=1, cache_backend=backend)
        assert entry(one, "decode", quantised_cache.EXPANDED) == 0


def test_fitting_zeros_takes_several_times_what_rounding_takes() -> None:
    settings = {"prompt_len": 8, "max_new_tokens": 129, "batch_size": 16}
    quanto, hqq = (
        entry(job(cache_backend=one, **settings), "renewal", quantised_cache.QUANTISING)
        for one in ("quanto", "hqq")
    )
    assert 3 * quanto < hqq < 6 * quanto


@given(
    backend=st.sampled_from(("quanto", "hqq", "fp8")),
    prompt_len=st.integers(1, 3000),
    max_new_tokens=st.integers(1, 400),
    more=st.integers(1, 300),
)
def test_more_new_tokens_never_need_less(
    backend: CacheBackend, prompt_len: int, max_new_tokens: int, more: int
) -> None:
    few = job(prompt_len=prompt_len, max_new_tokens=max_new_tokens, cache_backend=backend)
    many = replace(few, run=replace(few.run, max_new_tokens=max_new_tokens + more))
    assert ledger(few).peak_allocated_bytes <= ledger(many).peak_allocated_bytes


@given(elements=st.integers(64, 10**12))
def test_fewer_bits_never_take_more(elements: int) -> None:
    sizes = []
    for settings in ({"cache_nbits": 2}, {}, {"cache_backend": "fp8"}):
        stored = job(**settings).run.cache_format
        assert stored is not None
        sizes.append(kv_cache.stored_bytes(elements, stored, 2))
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("google/gemma-2-2b", {}, "needs full attention in every layer"),
        ("google-t5/t5-small", {}, "is for decoders only"),
        (LLAMA, {"cache_nbits": 3}, "cache_nbits: 3 is not accepted; give 4 or 2"),
        (LLAMA, {"cache_group_size": 4}, "must be 8 or more, got 4"),
        (LLAMA, {"cache_group_size": 63}, "63 can't be packed; give a multiple of 8"),
        (LLAMA, {"cache_group_size": 96}, "96 does not divide the 1024 elements"),
        (LLAMA, {"cache_backend": "fp8", "cache_nbits": 2}, "is not of cache_backend fp8"),
        (LLAMA, {"cache_residual_length": 0}, "must be 1 or more, got 0"),
    ],
)
def test_what_the_library_refuses_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(name, **settings)


def test_the_format_is_read_only_where_the_cache_is_quantised() -> None:
    plain, other = (job(kv_cache="dynamic", cache_nbits=nbits) for nbits in (4, 2))
    assert plain.run.cache_format is None
    assert ledger(plain).peak_allocated_bytes == ledger(other).peak_allocated_bytes


def test_bytes_moved_are_those_that_were_counted() -> None:
    """Counts of the libraries' operators on 16-bit tensors, their inputs and results."""
    quanto, hqq, fp8 = (job(cache_backend=one).run.cache_format for one in ("quanto", "hqq", "fp8"))
    assert quanto is not None
    assert hqq is not None
    assert fp8 is not None
    assert expanding(quanto, 2).element_bytes == pytest.approx(8.56 + 4, rel=0.01)
    assert expanding(hqq, 2).element_bytes == pytest.approx(18.06, rel=0.01)
    assert expanding(fp8, 2).element_bytes == pytest.approx(19.01 + 2, rel=0.01)
    assert storing(hqq, 4, "cpu").element_bytes == pytest.approx(3750, rel=0.01)


@pytest.mark.parametrize("backend", ["quanto", "hqq", "fp8"])
def test_many_candidates_at_once_are_what_each_is(backend: CacheBackend) -> None:
    import numpy as np

    one = job(cache_backend=backend, precision="fp32")
    shapes = [(b, p, n) for b in (1, 8) for p in (1, 700) for n in (1, 2, 129, 300)]
    columns = np.array(shapes).T
    columns_of = {"batch_size": columns[0], "prompt_len": columns[1], "max_new_tokens": columns[2]}
    whole = inference_ledger(generation(one, **columns_of))
    for index, (batch_size, prompt_len, max_new_tokens) in enumerate(shapes):
        run = replace(
            one.run, batch_size=batch_size, prompt_len=prompt_len, max_new_tokens=max_new_tokens
        )
        alone = ledger(replace(one, run=run))
        assert whole.peak_allocated_bytes[index] == alone.peak_allocated_bytes


def test_a_cache_in_fp8_has_a_scale_for_the_keys_and_one_for_the_values() -> None:
    stored = CacheFormat(backend="fp8", nbits=8, group_size=None, residual_length=0)
    assert kv_cache.stored_bytes(1000, stored, 2) == 1000 + 2 * 4


def test_four_bits_have_a_scale_and_a_zero_for_each_group() -> None:
    stored = CacheFormat(backend="quanto", nbits=4, group_size=64, residual_length=128)
    assert kv_cache.stored_bytes(1000, stored, 2) == 500 + 2 * 2 * 16


def test_a_generation_shorter_than_its_residual_is_never_quantised_anew() -> None:
    """128 new tokens stay as they are; the 129th step is the first that quantises them."""
    length = job().run.cache_format.residual_length  # type: ignore[union-attr]
    assert length == 128
    for new_tokens, is_renewed in ((2, False), (128, False), (129, True)):
        one = job(prompt_len=512, max_new_tokens=new_tokens)
        sizes = [
            entry(one, "renewal", fact)
            for fact in (
                quantised_cache.FRESH_CACHE,
                quantised_cache.EXPANDED,
                quantised_cache.QUANTISING,
            )
        ]
        assert all(size > 0 for size in sizes) if is_renewed else sizes == [0, 0, 0]


def test_a_step_pays_its_share_of_storing_the_cache_anew() -> None:
    """Every 128th step quantises all of it; every step expands it."""
    one = job()
    kept = storing(one.run.cache_format, one.dtypes.compute_bytes, "cuda")  # type: ignore[arg-type]
    read = expanding(one.run.cache_format, one.dtypes.compute_bytes)  # type: ignore[arg-type]
    step = conversion(one.run, one.dtypes, decoding=True)
    assert step.element_bytes == pytest.approx(read.element_bytes + kept.element_bytes / 128)
    assert conversion(one.run, one.dtypes, decoding=False) == kept
