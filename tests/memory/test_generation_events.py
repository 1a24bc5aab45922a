"""The requests of a generation: each is freed once, and they add up to the ledger."""

from dataclasses import replace

import pytest

from tests.memory.test_reserved import MODEL
from whichlora.memory.event_list import unsplit_weight_bytes
from whichlora.memory.generation_events import generation_events, has_events
from whichlora.memory.inference import Generation, inference_ledger
from whichlora.memory.reserved import replayed_idle_bytes
from whichlora.predict import quantities
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model
from whichlora.units import MiB

GPU = find_gpu("h100-sxm-80gb")


def generation_of(model: str = MODEL, **settings: object) -> Generation:
    spec = find_model(model)
    assert spec is not None
    sizes = {"batch_size": 8, "prompt_len": 1024, "max_new_tokens": 4}
    run = RunConfig(model=model, phase="inference", **sizes | settings)
    return quantities.generation(resolve(spec, run, GPU))


RUNS = [
    {},
    {"kv_cache": "static"},
    {"attn": "eager"},
    {"quant": "nf4-dq", "precision": "fp16"},
    {"model": "openai-community/gpt2", "prompt_len": 512},
    {"model": "google/gemma-2-2b", "kv_cache": "static"},
    {"model": "answerdotai/ModernBERT-base"},
]


@pytest.mark.parametrize("settings", RUNS)
def test_every_storage_is_born_before_it_dies_and_live_bytes_are_the_ledgers(
    settings: dict[str, object],
) -> None:
    run = generation_of(**settings)
    assert has_events(run)
    requests = generation_events(run)
    alive: dict[int, int] = {}
    for number, size in requests.events:
        if size is None:
            del alive[number]
        else:
            assert number not in alive
            alive[number] = size
    counted = inference_ledger(run)
    unsplit = unsplit_weight_bytes(run.model, run.dtypes)  # of blocks, not of storages
    live = counted.peak_allocated_bytes - counted.workspace_bytes - unsplit
    assert requests.peak_bytes - requests.workspace_bytes == pytest.approx(live, rel=0.01)


def test_a_growing_cache_is_copied_layer_by_layer_and_a_static_one_is_not() -> None:
    growing, static = (
        generation_events(generation_of(batch_size=32, kv_cache=kind))
        for kind in ("dynamic", "static")
    )
    ((layer, num_layers),) = generation_of().model.layers()
    # keys of one layer in the last step, which sees all tokens but the one that it makes
    size = 32 * (1024 + 3) * layer.attentions[0].cache_elements // 2 * 2
    born = [num_bytes for _, num_bytes in growing.events]
    assert born.count(size) == 2 * num_layers
    assert len(static.events) < len(growing.events)


def test_what_is_not_written_as_events_keeps_the_estimate() -> None:
    assert not has_events(generation_of("google-t5/t5-base", prompt_len=128))
    assert not has_events(generation_of("albert/albert-base-v2", prompt_len=128))
    assert not has_events(generation_of("deepseek-ai/DeepSeek-V2-Lite"))


def test_a_long_generation_is_replayed_only_where_the_prompt_reserves_most() -> None:
    """Of many decoding steps some are left out; segments that a cache outgrows depend on each."""

    def idle(**settings: object) -> int | None:
        run = generation_of(**settings)
        counted = inference_ledger(run)
        live = counted.peak_allocated_bytes - counted.workspace_bytes
        return replayed_idle_bytes(run, live_bytes=live)

    after_prompt = idle(prompt_len=4096, batch_size=8, max_new_tokens=100)
    assert after_prompt is not None
    assert idle(prompt_len=16, batch_size=64, max_new_tokens=512) is None


def test_few_steps_are_all_there() -> None:
    few, many = generation_of(max_new_tokens=33), generation_of(max_new_tokens=34)
    assert not generation_events(few).skips_steps
    assert generation_events(many).skips_steps


def test_a_gpu_without_these_rules_keeps_the_estimate() -> None:
    run = generation_of()
    on_cpu = replace(run, gpu=replace(run.gpu, kind="cpu"))
    assert replayed_idle_bytes(on_cpu, live_bytes=MiB) is None
