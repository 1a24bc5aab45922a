"""What weights take of the allocator's segments, to the last digit of published logs."""

from __future__ import annotations

import pytest
from devices import A100

from whichlora.memory.entries import Entry
from whichlora.predict.resolve import resolve
from whichlora.serving.rank import rank_model
from whichlora.serving.segments import UNUSED_SEGMENTS, unused_bytes
from whichlora.serving.sglang import start as start_sglang
from whichlora.serving.vllm_memory import start as start_vllm
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB, MiB


def loaded(engine: str, version: str, model: str, **options: object) -> tuple[Entry, ...]:
    run = RunConfig(
        model=model,
        phase="inference",
        serving=engine,
        context=4096,
        libraries=((engine, version),),
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )
    gpu = find_gpu("h200-sxm-141gb")
    start = start_vllm if engine == "vllm" else start_sglang
    entries = start(resolve(load_model(model), run, gpu).served).entries
    return tuple(entry for entry in entries if entry.part == "weights")


def total(entries: tuple[Entry, ...]) -> int:
    return sum(entry.num_bytes for entry in entries)


@pytest.mark.parametrize(
    ("model", "ranks", "published_gib"),
    [  # "Model loading took" of vLLM, which counts blocks in use
        ("Qwen/Qwen2.5-7B-Instruct", 1, 14.2488),
        ("Qwen/Qwen2.5-3B-Instruct", 1, 5.7916),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1, 2.8871),
        ("Qwen/Qwen3-8B", 1, 15.2683),
        ("Qwen/Qwen2.5-32B", 2, 30.73),  # DeepSeek-R1-Distill-Qwen-32B
    ],
)
def test_what_vllm_loads_is_to_the_last_digits_as_published(
    model: str, ranks: int, published_gib: float
) -> None:
    entries = loaded("vllm", "0.9.2", model, tensor_parallel_size=ranks)
    assert total(entries) / GiB == pytest.approx(published_gib, abs=0.0007 if ranks == 1 else 0.005)


@pytest.mark.parametrize(
    ("version", "model", "ranks", "published_gib"),
    [  # "mem usage" after loading of SGLang, which reads what is free
        ("0.4.3", "Qwen/QwQ-32B", 4, 15.54),
        ("0.5.10", "Qwen/Qwen3-14B", 4, 7.08),
        ("0.5.10", "Qwen/Qwen3.5-9B", 2, 8.85),
    ],
)
def test_what_sglang_misses_of_free_memory_is_as_published(
    version: str, model: str, ranks: int, published_gib: float
) -> None:
    entries = loaded("sglang", version, model, tp_size=ranks)
    assert total(entries) / GiB == pytest.approx(published_gib, abs=0.02)


def test_releases_of_vllm_that_read_what_is_free_count_whole_segments() -> None:
    rests = [
        next(
            entry.num_bytes
            for entry in loaded("vllm", version, "Qwen/Qwen2.5-7B-Instruct")
            if entry.fact is UNUSED_SEGMENTS
        )
        for version in ("0.6.3", "0.6.4", "0.26.0", "0.27.0")
    ]
    assert rests[0] == rests[3] > rests[1] == rests[2] > 50 * MiB


@pytest.mark.parametrize("in_use", [False, True])
def test_expandable_segments_leave_no_more_than_one_page(in_use: bool) -> None:
    rank = load_model("Qwen/Qwen2.5-7B-Instruct")
    dtypes = resolve(rank, RunConfig(model=rank.name), A100).dtypes
    assert isinstance(dtypes, Dtypes)
    assert unused_bytes(rank, dtypes, in_use=in_use, expandable=True) <= 20 * MiB
    assert unused_bytes(rank, dtypes, in_use=in_use) > 50 * MiB


def test_a_rest_is_what_a_segment_has_beyond_a_matrix() -> None:
    """Of QwQ's o_proj, 12.5 MiB, its segment leaves 1.5 MiB cut off; of the others less is left."""
    rank = rank_model(load_model("Qwen/QwQ-32B"), 4)
    dtypes = resolve(rank, RunConfig(model=rank.name), A100).dtypes
    assert isinstance(dtypes, Dtypes)
    cut_off = unused_bytes(rank, dtypes) - unused_bytes(rank, dtypes, in_use=True)
    assert cut_off // MiB in range(96, 99)  # 64 layers
