"""One run over unequal cards: the fullest decides whether it fits, the slowest the time."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora.api import estimate, where
from whichlora.errors import ConfigError
from whichlora.spec.results import Prediction
from whichlora.store.gpus import find_cards

MODEL = "meta-llama/Llama-3.2-1B"
ASKED: dict[str, Any] = {"method": "lora", "seq_len": 512, "parallel": "ddp"}


def predicted(gpu: str, gpus: int | None = None, **settings: Any) -> Prediction:
    (prediction,) = estimate(MODEL, gpu, gpus=gpus, **(ASKED | settings))
    return prediction


def test_memory_is_of_each_card_and_time_of_the_slowest() -> None:
    both = predicted("t4-16gb+rtx-3090-24gb", 2, precision="fp16")
    alone = {
        gpu: predicted(gpu, 2, precision="fp16", interconnect="pcie-3-no-peer")
        for gpu in ("t4-16gb", "rtx-3090-24gb")
    }
    assert both.gpu == "t4-16gb+rtx-3090-24gb"
    assert both.memory == alone["t4-16gb"].memory
    assert both.usable_bytes == alone["t4-16gb"].usable_bytes
    assert both.time == max((each.time for each in alone.values()), key=lambda time: time.step_s)
    assert both.several_gpus is not None
    for rank, number in zip(both.several_gpus.ranks, (0, 1), strict=True):
        assert rank.ranks == (number,)
        (same,) = alone[rank.name].several_gpus.ranks  # type: ignore[union-attr]
        assert rank.breakdown == same.breakdown
    assert any("they wait for t4-16gb" in note for note in both.notes)


def test_one_card_that_lacks_memory_fails_the_run() -> None:
    asked = {"batch_size": 4, "seq_len": 1024, "precision": "fp16", "gradient_checkpointing": False}
    assert predicted("rtx-3090-24gb", 2, **asked).verdict != "fails"
    both = predicted("2xrtx-3090-24gb+gtx-1080-ti-11gb", 3, **asked)
    assert both.verdict == "fails"
    assert not both.fits
    assert both.run.parallel.gpus == 3
    assert both.several_gpus is not None
    assert [rank.ranks for rank in both.several_gpus.ranks] == [(0, 1), (2,)]


def test_without_a_strategy_the_best_that_divides_data_is_found() -> None:
    both = predicted("rtx-3090-24gb+rtx-4090-24gb", parallel=None)
    assert both.run.parallel.gpus == 2
    assert not {"tp", "pp", "cp", "device-map"} & set(both.run.parallel.names)
    assert both.notes[0].startswith("parallel auto on 2 GPUs")
    assert both.run.parallel.interconnect == "auto"


def test_all_ranks_compute_in_a_precision_that_each_card_has() -> None:
    both = predicted("rtx-3090-24gb+t4-16gb", parallel="ddp", gpus=2)
    assert both.run.precision == "fp16"


@pytest.mark.parametrize(
    ("gpu", "gpus", "settings", "message"),
    [
        ("3090+4090", 2, {"parallel": "tp"}, "tp on unequal cards is not modelled; use ddp, fsdp"),
        ("3090+4090", 4, {}, "are 2 cards, got 4; leave gpus out"),
        ("3090+rtx-3090-24gb", 2, {}, "cards are equal; write 2xrtx-3090-24gb"),
        ("3090+warp", 2, {}, "unknown GPU 'warp'"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(
    gpu: str, gpus: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(gpu, gpus, **settings)


def test_an_engine_on_unequal_cards_names_the_smallest() -> None:
    message = r"give --gpu 2xrtx-3070-8gb, or one card, or a stage for each: --serving-option pip"
    with pytest.raises(ConfigError, match=message):
        estimate(MODEL, "rtx-3090-24gb+rtx-3070-8gb", phase="inference", serving="vllm")


def test_each_stage_of_a_pipeline_has_a_card_of_its_own() -> None:
    """The pool is that of the card with the fewest blocks, by the layers that it has."""
    cards = "rtx-3090-24gb+rtx-3070-8gb"
    pools = {}
    for layers in ("8,8", "13,3"):
        options = {"pipeline_parallel_size": 2, "VLLM_PP_LAYER_PARTITION": layers}
        (both,) = estimate(
            MODEL, cards, phase="inference", serving="vllm", context=4096, serving_options=options
        )
        assert both.serving is not None
        pools[layers] = both.serving.kv_pool_tokens
        assert any("on rtx-3090-24gb, " in note and "rtx-3070-8gb" in note for note in both.notes)
        assert both.serving.time is not None
    assert pools["13,3"] > 2 * pools["8,8"]


LLAMA_CPP: dict[str, Any] = {"phase": "inference", "serving": "llama-cpp", "context": 32768}


def test_an_engine_gives_unequal_cards_layers_by_their_memory() -> None:
    """12 of 17 layers are on the card that has two thirds of the memory."""
    (both,) = estimate(MODEL, "rtx-3090-24gb+rtx-3060-12gb", **LLAMA_CPP)
    assert both.gpu == "rtx-3090-24gb+rtx-3060-12gb"
    assert both.serving is not None
    assert "--device CUDA0,CUDA1" in both.serving.command
    note = next(note for note in both.notes if note.startswith("of each GPU"))
    assert "GPU 0 (rtx-3090-24gb) 12 layers" in note
    assert "GPU 1 (rtx-3060-12gb) 5 layers" in note


def test_the_card_that_is_filled_the_most_decides() -> None:
    """As many layers on a card of half the memory leave less of it."""
    options = {"tensor_split": "1/1"}
    (both,) = estimate(MODEL, "rtx-3090-24gb+rtx-3060-12gb", serving_options=options, **LLAMA_CPP)
    (small,) = estimate(MODEL, "rtx-3060-12gb", gpus=2, serving_options=options, **LLAMA_CPP)
    assert both.serving is not None
    assert small.serving is not None
    assert both.serving.left_bytes == pytest.approx(small.serving.left_bytes, rel=0.03)


def test_a_token_takes_as_long_as_both_cards_take_for_their_layers() -> None:
    def tpot_s(gpu: str, **settings: Any) -> float:
        (found,) = estimate(MODEL, gpu, **LLAMA_CPP, **settings)
        assert found.serving is not None
        assert found.serving.time is not None
        return found.serving.time.tpot_s

    options = {"tensor_split": "1/1"}
    large = tpot_s("rtx-3090-24gb", gpus=2, serving_options=options)
    small = tpot_s("rtx-3060-12gb", gpus=2, serving_options=options)
    both = tpot_s("rtx-3090-24gb+rtx-3060-12gb", serving_options=options)
    assert both == pytest.approx((large + small) / 2, rel=0.05)


def test_cards_beside_each_other_are_not_mistaken_for_equal_ones() -> None:
    together = estimate(MODEL, ["2xrtx-3090-24gb", "rtx-3090-24gb+rtx-3060-12gb"], **LLAMA_CPP)
    assert len({found.serving.kv_pool_bytes for found in together if found.serving}) == 2


def test_other_commands_say_what_to_ask_instead() -> None:
    with pytest.raises(ConfigError, match="elsewhere name the smallest"):
        where(MODEL, "3090+4090")


def test_cards_are_counted() -> None:
    cards = find_cards("3090 + 2x4090+rtx-3090-24gb")
    assert [(gpu.key, number) for gpu, number in cards] == [
        ("rtx-3090-24gb", 2),
        ("rtx-4090-24gb", 2),
    ]
    ((card, number),) = find_cards("4090")
    assert (card.key, number) == ("rtx-4090-24gb", 1)


def test_the_cards_state_their_number_to_a_strategy_that_is_named() -> None:
    (prediction,) = estimate("Qwen/Qwen2.5-0.5B", "3090+2x4090", parallel="ddp")
    assert prediction.run.parallel.gpus == 3


def test_equal_cards_of_one_run_stand_beside_a_single_one() -> None:
    settings = {"method": "qlora", "seq_len": 512}
    two, one = estimate("Qwen/Qwen2.5-7B", ["2x3090", "a6000"], **settings)  # type: ignore[arg-type]
    assert (two.gpu, two.run.parallel.gpus) == ("rtx-3090-24gb", 2)
    assert (one.gpu, one.run.parallel.gpus) == ("rtx-a6000-48gb", 1)
    assert [two, one] == [
        *estimate("Qwen/Qwen2.5-7B", "3090", gpus=2, **settings),  # type: ignore[arg-type]
        *estimate("Qwen/Qwen2.5-7B", "a6000", **settings),  # type: ignore[arg-type]
    ]
    with pytest.raises(ConfigError, match="gpu: 2x3090 states how many; leave gpus out"):
        estimate("Qwen/Qwen2.5-7B", "2x3090", gpus=4)
