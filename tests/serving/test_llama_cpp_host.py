"""What a host of llama.cpp is taken for, and how its user states it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.serving.llama_cpp_host import stated_bytes_per_s
from whichlora.spec.options import OptionValue, written
from whichlora.spec.results import Prediction, ServingTime
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

LARGE = "meta-llama/Llama-3.1-70B"
RUN = RunConfig(model=LARGE, phase="inference", serving="llama-cpp", context=8192)


def predicted(gpu: str = "rtx-4090-24gb", **options: OptionValue) -> Prediction:
    options = {"file_type": "Q4_K_M", **options}
    run = replace(RUN, serving_options=tuple(sorted(options.items())))
    device = find_target(gpu)
    return predict(load_model(LARGE), run, device, load_calibration(device))


def time_of(prediction: Prediction) -> ServingTime:
    assert prediction.serving is not None
    assert prediction.serving.time is not None
    return prediction.serving.time


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("89.6", 89.6),
        ("ddr5-5600", 89.6),
        ("DDR4-3200", 51.2),
        ("2xddr4-3200", 51.2),
        ("1xddr4-2666", 21.328),
        ("12xDDR5-4800", 460.8),
    ],
)
def test_memory_is_stated_by_its_name_or_in_gigabytes_a_second(text: str, gigabytes: float) -> None:
    assert stated_bytes_per_s(text) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("text", ["ddr5", "fast", "0", "-3", "nan", "inf", "1e9", "ddr9-1", ""])
def test_what_names_no_memory_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"host_bandwidth: .* is no memory; give GB/s") as error:
        predicted(host_bandwidth=text)
    assert "\n" not in str(error.value)


def test_a_model_that_fit_splits_has_times_of_usual_hosts_and_says_how_to_state_one() -> None:
    usual = predicted()
    assert any("state yours: --serving-option host_bandwidth=ddr5-5600" in n for n in usual.notes)
    low, high = time_of(usual).interval_tpot_s
    for memory in ("ddr4-3200", "ddr5-6000"):
        assert low < time_of(predicted(host_bandwidth=memory)).tpot_s < high
    stated = predicted(host_bandwidth="ddr5-5600")
    assert any("of a host whose memory has 89.6 GB/s" in note for note in stated.notes)
    assert time_of(stated).interval_tpot_s[1] - time_of(stated).interval_tpot_s[0] < high - low


def test_the_command_leaves_out_what_llama_server_does_not_know() -> None:
    answer = predicted(host_bandwidth="ddr5-5600", load_mode="none", n_gpu_layers=40).serving
    assert answer is not None
    assert "bandwidth" not in answer.command
    assert answer.command.endswith(" --load-mode none --n-gpu-layers 40")


def test_notes_say_what_makes_prompts_faster_until_it_is_done() -> None:
    words = "each micro-batch of a prompt copies"
    (usual,) = (note for note in predicted().notes if words in note)
    assert "ubatch_size=2048" in usual
    assert "load_mode=none" in usual
    done = predicted(ubatch_size=2048, no_mmap=True)
    assert not any(words in note for note in done.notes)
    assert time_of(done).ttft_s < time_of(predicted()).ttft_s


def test_a_gpu_that_holds_all_says_nothing_of_a_host() -> None:
    whole = predicted("h200-sxm-141gb")
    assert not any("times are of" in note for note in whole.notes)
    same = predicted("h200-sxm-141gb", host_bandwidth="20")
    assert time_of(same) == time_of(whole)


def test_gigabytes_a_second_are_accepted_as_a_command_line_reads_them() -> None:
    of_number, of_text = predicted(host_bandwidth=written("89.6")), predicted(host_bandwidth="89.6")
    assert time_of(of_number) == time_of(of_text)


# --- a processor alone ------------------------------------------------------------------------


def test_a_processor_alone_writes_as_fast_as_its_memory_is_read() -> None:
    slow, fast = (time_of(predicted("cpu-64gb", host_bandwidth=memory)) for memory in ("40", "80"))
    assert slow.tpot_s == pytest.approx(2 * fast.tpot_s, rel=0.01)
    assert slow.ttft_s == pytest.approx(2 * fast.ttft_s, rel=0.01)


def test_without_its_memory_a_processor_has_an_interval_over_usual_ones() -> None:
    usual = predicted("cpu-64gb")
    low, high = time_of(usual).interval_tpot_s
    for memory in ("ddr4-3200", "ddr5-6000"):
        assert low < time_of(predicted("cpu-64gb", host_bandwidth=memory)).tpot_s < high
    assert any("state yours: --serving-option host_bandwidth=ddr5-5600" in n for n in usual.notes)


def test_the_first_token_of_a_processor_is_less_sure_than_the_others() -> None:
    prediction = predicted("cpu-64gb", host_bandwidth="ddr5-5600")
    time = time_of(prediction)
    of_first, of_others = (high / low for low, high in (time.interval_ttft_s, time.interval_tpot_s))
    assert of_first > 2 * of_others
    low, high = time.interval_output_tokens_per_s
    assert low < time.output_tokens_per_s < high
    assert any("does not say how fast a prompt is read" in note for note in prediction.notes)


def test_several_slots_of_a_processor_are_less_sure_than_one() -> None:
    one, four = (
        time_of(predicted("cpu-128gb", host_bandwidth="ddr5-5600", parallel=slots))
        for slots in (1, 4)
    )
    assert four.interval_tpot_s[1] / four.tpot_s > one.interval_tpot_s[1] / one.tpot_s


def test_a_processor_whose_memory_is_too_small_has_no_time() -> None:
    answer = predicted("cpu-16gb").serving
    assert answer is not None
    assert not answer.starts
    assert answer.time is None


# --- memory that the GPU shares ---------------------------------------------------------------


def test_a_host_that_shares_the_memory_of_its_gpu_reads_that_and_frees_nothing() -> None:
    prediction = predicted("gb10", n_gpu_layers=40)
    assert any("of a host whose memory has 273 GB/s" in note for note in prediction.notes)
    assert any("a part on the host frees nothing" in note for note in prediction.notes)
    usual = time_of(predicted("gb10", n_gpu_layers=40, host_bandwidth="ddr5-5600"))
    assert time_of(predicted("gb10")).tpot_s < time_of(prediction).tpot_s < usual.tpot_s
