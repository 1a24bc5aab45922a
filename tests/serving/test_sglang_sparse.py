"""Sparse attention in SGLang: bytes of a token, pages, and what an indexer adds to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.rank import rank_model
from whichlora.serving.sglang import page_size, stepping, token_bytes
from whichlora.serving.sglang_sparse import FIRST_KERNELS, check, latent_share
from whichlora.serving.step_time import Step, step_timer
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

DEEPSEEK = "deepseek-ai/DeepSeek-V3.2"


def asked(
    model: str = DEEPSEEK,
    gpu: str = "h200-sxm-141gb",
    libraries: tuple[tuple[str, str], ...] = (),
    **options: object,
) -> Served:
    run = RunConfig(
        model=model,
        phase="inference",
        serving="sglang",
        context=65536,
        quant="fp8",
        libraries=libraries,
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )
    return resolve(load_model(model), run, find_gpu(gpu)).served


@pytest.mark.parametrize(
    ("model", "gpu", "kv_cache_dtype", "expected"),
    [  # layers x latent, layers with an indexer x 132; kv_cache_configurator.py:3412
        (DEEPSEEK, "h200-sxm-141gb", "auto", 61 * 1152 + 61 * 132),
        (DEEPSEEK, "h200-sxm-141gb", "fp8_e4m3", 61 * 656 + 61 * 132),
        (DEEPSEEK, "b200-180gb", "auto", 61 * 576 + 61 * 132),
        ("zai-org/GLM-5", "h200-sxm-141gb", "auto", 78 * 1152 + 78 * 132),
        ("zai-org/GLM-5.2", "h200-sxm-141gb", "auto", 78 * 1152 + 21 * 132),
        ("deepseek-ai/DeepSeek-V3", "b200-180gb", "auto", 61 * 1152),
    ],
)
def test_a_token_takes_its_latents_and_the_keys_of_indexers(
    model: str, gpu: str, kv_cache_dtype: str, expected: int
) -> None:
    served = asked(model, gpu, kv_cache_dtype=kv_cache_dtype)
    for ranks in (1, 8):
        assert token_bytes(served, rank_model(served.model, ranks)) == expected


def test_pages_have_64_tokens_whatever_is_asked_for() -> None:
    assert page_size(asked(page_size=16)) == 64
    assert page_size(asked("deepseek-ai/DeepSeek-V3", page_size=16)) == 16


def test_a_packed_latent_is_read_with_its_scales() -> None:
    assert latent_share(asked(kv_cache_dtype="fp8_e4m3")) * 576 == pytest.approx(656)
    assert latent_share(asked(gpu="b200-180gb")) == 1.0


def test_attention_stops_to_grow_where_keys_are_chosen_and_the_indexer_goes_on() -> None:
    """Beyond 2,048 tokens a layer reads 132 bytes and a score of each, not a latent of 1,152."""
    sparse, dense = asked(tp_size=8), asked("deepseek-ai/DeepSeek-V3", tp_size=8)

    def growth(served: Served) -> float:
        timer = step_timer(served, stepping=stepping(served), reduction_s=lambda _: 0.0)
        short, long = (
            timer.parts(Step(decoding=8, cached_tokens=8 * each, sampled=8))["attention"]
            for each in (16384, 32768)
        )
        return long - short

    assert 0.08 < growth(sparse) / growth(dense) < 0.3


def test_an_older_indexer_has_more_kernels() -> None:
    """Every layer of GLM-5 has one, and of GLM-5.2 21 of 78."""
    older = (("sglang", "0.5.9"),)
    assert stepping(asked(libraries=older)).indexer_kernels == FIRST_KERNELS

    def kernels(model: str, libraries: tuple[tuple[str, str], ...] = ()) -> int:
        served = asked(model, libraries=libraries)
        timer = step_timer(served, stepping=stepping(served), reduction_s=lambda _: 0.0)
        return timer.pointwise_kernels

    more = [kernels(name, older) - kernels(name) for name in ("zai-org/GLM-5", "zai-org/GLM-5.2")]
    assert more[0] * 21 == more[1] * 78 > 0


@pytest.mark.parametrize(
    ("gpu", "kv_cache_dtype", "message"),
    [
        ("a100-sxm-80gb", "auto", "is not predicted for compute capability 8.0"),
        ("h200-sxm-141gb", "fp8_e5m2", "reads no fp8_e5m2"),
    ],
)
def test_what_has_no_kernel_is_refused(gpu: str, kv_cache_dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(replace(asked(kv_cache_dtype=kv_cache_dtype), gpu=find_gpu(gpu)))
