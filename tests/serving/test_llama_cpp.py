"""llama.cpp's start: what is held where, what --fit moves, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from devices import A100, CPU

from whichlora.calibration.load import load_calibration
from whichlora.cli import main
from whichlora.errors import ConfigError
from whichlora.predict.explain import explain
from whichlora.predict.largest import Size
from whichlora.predict.notes import notes_on
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving import other_name_note
from whichlora.serving.base import Served
from whichlora.serving.form import form_in_words
from whichlora.serving.gguf import FILE_TYPES
from whichlora.serving.llama_cpp import ENGINE, command, notes, start, stepping, weight_bytes
from whichlora.serving.llama_cpp_memory import (
    MARGIN_BYTES,
    cache_bytes,
    cells_kept,
    file_type,
    free_bytes,
    micro_batch,
    placement,
    slots,
    taken,
)
from whichlora.serving.llama_cpp_split import Moved, Placement
from whichlora.serving.step_time import Step, StepTimer, own_all_reduce, step_timer
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.options import OptionValue, by_own_names
from whichlora.spec.results import ServingTime
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.terminal.explained import methods_sheet
from whichlora.units import GiB, MiB
from whichlora.workflow import estimates
from whichlora.workflow.combinations import grid

LLAMA = "meta-llama/Llama-3.1-8B"
LARGE = "meta-llama/Llama-3.1-70B"
Q4: dict[str, object] = {"file_type": "Q4_K_M"}
GEMMA = "google/gemma-3-12b-pt"
GRID: dict[str, list[object]] = {
    "model": [LLAMA],
    "phase": ["inference"],
    "serving": ["llama-cpp"],
    "serving_options": [()],
}
RUN = RunConfig(model=LLAMA, phase="inference", serving="llama-cpp", context=8192)


def card(gib: float) -> GpuSpec:
    return replace(A100, memory_bytes=round(gib * GiB), context_bytes=0)


def served(run: RunConfig = RUN, gpu: GpuSpec = A100, **options: object) -> Served:
    run = replace(run, serving_options=tuple(sorted(options.items())))
    return resolve(load_model(run.model), run, gpu).served


def test_the_cache_has_every_cell_of_every_slot() -> None:
    asked = served(replace(RUN, batch_size=4))
    assert slots(asked) == 4
    per_token = 32 * 2 * 1024 * 2  # layers, keys and values, their width, fp16
    assert sum(cache_bytes(asked, cells_kept(asked, 8192, 4))) == 4 * 8192 * per_token
    in_blocks = served(RUN, cache_type_k="q8_0", cache_type_v="q8_0")
    cells = cells_kept(in_blocks, 8192, 1)
    assert sum(cache_bytes(in_blocks, cells)) == 8192 * per_token * 34 // 64


def test_a_slot_is_padded_to_256_tokens() -> None:
    assert cells_kept(served(), 8193, 1).cells == ((None, 8448),)


def test_sliding_layers_keep_their_window_and_a_micro_batch() -> None:
    run = replace(RUN, model=GEMMA, batch_size=2)
    assert dict(cells_kept(served(run), 8192, 2).cells) == {None: 8192, 1024: 1536}
    shared = served(run, kv_unified=True)
    assert dict(cells_kept(shared, 8192, 2).cells) == {None: 8192, 1024: 2560}
    assert set(dict(cells_kept(served(run, swa_full=True), 8192, 2).cells).values()) == {8192}


def test_slots_that_share_a_cache_may_each_have_all_of_it() -> None:
    """`-c 262144 -np 2 -kvu` with a cache in q8_0: 4352 MiB published, of 8 layers and 2 slots."""
    run = replace(RUN, model="Qwen/Qwen3.5-9B", context=262144)
    blocks = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "file_type": "Q4_K_M"}
    shared = served(run, card(12.5), parallel=2, kv_unified=True, fit=False, **blocks)
    of_states = sum(cache_bytes(shared, cells_kept(shared, 0, 2)))
    assert sum(cache_bytes(shared, cells_kept(shared, 262144, 2))) - of_states == 4352 * MiB
    started = start(shared)
    assert not started.fault
    assert started.max_running(262144) == 1
    assert started.max_running(65536) == 2  # as many as there are slots
    assert "-c 262144 -np 2 " in command(shared)
    apart = start(served(run, card(12.5), parallel=2, fit=False, **blocks))
    assert "the cache of 2 x 262144 tokens" in apart.fault
    small = start(served(run, card(8), parallel=2, kv_unified=True, fit=False, **blocks))
    assert "the cache of 262144 tokens" in small.fault


def test_a_micro_batch_is_no_larger_than_the_batch_or_the_cache() -> None:
    assert micro_batch(served(), 8192) == 512
    assert micro_batch(served(RUN, batch_size=64), 8192) == 64
    assert micro_batch(served(RUN, ubatch_size=4096), 256) == 256


def test_the_file_is_of_the_precision_unless_a_type_is_stated() -> None:
    assert file_type(served()) == "BF16"
    assert file_type(served(replace(RUN, precision="fp16"))) == "F16"
    assert file_type(served(RUN, file_type="Q4_K_M")) == "Q4_K_M"


def test_what_does_not_fit_goes_to_the_host_until_the_margin_is_free() -> None:
    asked = served(RUN, card(12))
    placed = placement(asked)
    assert 0 < placed.layers < 33
    room = free_bytes(asked)[0] - MARGIN_BYTES
    assert taken(asked, placed, 8192, 1).device <= room
    one_more = Placement(by_device=(placed.layers + 1,))
    assert taken(asked, one_more, 8192, 1).device > room
    assert not start(asked).fault


def test_experts_go_to_the_host_before_layers_do() -> None:
    run = replace(RUN, model="Qwen/Qwen3-30B-A3B")
    placed = placement(served(run, card(24), file_type="Q8_0"))
    assert placed.layers == 49
    layers = [each.layer for each in placed.moved]
    assert layers == list(range(layers[0], 48))
    assert layers[0] > 0
    assert {each.kind for each in placed.moved[1:]} == {"experts"}


def test_experts_that_are_asked_to_lie_on_the_host_do_and_nothing_else_moves() -> None:
    run = replace(RUN, model="Qwen/Qwen3-30B-A3B")
    asked = served(run, card(24), file_type="Q8_0", n_cpu_moe=10)
    first = tuple(Moved(layer=layer, kind="experts") for layer in range(10))
    assert placement(asked) == Placement(by_device=(49,), moved=first)
    assert start(asked).fault.startswith("weights take")  # --fit moves nothing beside it
    assert "give a larger n_cpu_moe" in start(asked).fault
    every = served(run, card(24), file_type="Q8_0", cpu_moe=True)
    assert [each.layer for each in placement(every).moved] == list(range(48))
    assert any("experts of 48 of 48 layers" in note for note in notes(every, start(every)))
    with pytest.raises(ConfigError, match="n_cpu_moe and cpu_moe move experts, and"):
        served(RUN, n_cpu_moe=10)


def test_stated_layers_stay_and_may_not_fit() -> None:
    asked = served(RUN, card(12), n_gpu_layers=99)
    assert placement(asked).layers == 33
    fault = start(asked).fault
    assert fault.startswith("weights take 13.98 GiB, the cache of 1 x 8192 tokens 1.00 GiB")
    few = served(RUN, card(12), n_gpu_layers=10)
    assert placement(few).layers == 10
    assert not start(few).fault


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("ngl", "all", {"n_gpu_layers": 999}),
        ("n_gpu_layers", -2, {"n_gpu_layers": 999}),
        ("ngl", "AUTO", {}),
        ("num_gpu", -1, {}),
        ("num_gpu", 0, {"n_gpu_layers": 0}),
        ("fit", "off", {"fit": False}),
        ("fit", "on", {"fit": True}),
        ("fa", True, {"flash_attn": "on"}),
        ("OLLAMA_FLASH_ATTENTION", 0, {"flash_attn": "off"}),
    ],
)
def test_its_own_words_are_accepted(
    name: str, value: OptionValue, means: dict[str, OptionValue]
) -> None:
    assert dict(by_own_names(ENGINE.options, [(name, value)])) == means


def test_all_layers_are_asked_for_where_fit_would_move_some() -> None:
    asked = served(RUN, card(12), n_gpu_layers="all")
    assert placement(asked).layers == 33
    assert start(asked).fault
    by_fit = served(RUN, card(12), n_gpu_layers="auto")
    assert placement(by_fit) == placement(served(RUN, card(12)))
    with pytest.raises(ConfigError, match=r"'some' is not a whole .*, nor one of auto, -1, all"):
        served(RUN, n_gpu_layers="some")


def test_no_layer_on_the_gpu_leaves_it_the_products_of_long_prompts() -> None:
    asked = served(RUN, card(12), n_gpu_layers=0)
    needed = taken(asked, placement(asked), 8192, 1)
    assert (needed.layers, needed.output, needed.cache) == (0, 0, 0)
    assert needed.compute
    found = start(asked)
    assert not found.fault
    assert any("keys and values lie on the host" in note for note in notes(asked, found))


def test_without_fit_a_card_that_is_too_small_is_told_the_longest_context() -> None:
    asked = served(replace(RUN, context=131072), card(17), fit=False)
    found = start(asked)
    longest = found.pool.max_context(131072)
    assert f"a context up to {longest} for one slot" in found.fault
    assert not start(served(replace(RUN, context=longest), card(17), fit=False)).fault
    assert start(served(replace(RUN, context=longest + 512), card(17), fit=False)).fault


def test_a_cpu_holds_everything() -> None:
    asked = served(replace(RUN, context=2048), replace(CPU, memory_bytes=64 * GiB))
    found = taken(asked, placement(asked), 2048, 1)
    assert found.host == 0
    assert found.layers + found.output == pytest.approx(16.06e9, rel=1e-3)
    assert (
        "give a smaller file_type"
        in start(replace(asked, gpu=replace(CPU, memory_bytes=GiB))).fault
    )


def test_the_answer_has_the_command_as_it_was_judged() -> None:
    run = replace(
        RUN,
        batch_size=4,
        serving_options=(("cache_type_k", "q8_0"), ("file_type", "Q4_K_M"), ("fit", False)),
    )
    answer = predict(load_model(LLAMA), run, A100, load_calibration(A100)).serving
    assert answer
    assert answer.command == (
        "llama-server -m Llama-3.1-8B-Q4_K_M.gguf -c 32768 -np 4 --cache-type-k q8_0 --fit off"
    )
    assert answer.starts
    assert answer.max_running > 40


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Llama-3.1-8B-Instruct-Q4_K_M.gguf", "-m Llama-3.1-8B-Instruct-Q4_K_M.gguf"),
        ("Llama-3.1-8B-Instruct.Q5_K_M.gguf", "-m Llama-3.1-8B-Instruct.Q5_K_M.gguf"),
        ("llama3.1:8b-q4_K_M", "-m llama3.1:8b-Q4_K_M.gguf"),
        ("unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M", "-hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"),
        (LLAMA, "-m Llama-3.1-8B-BF16.gguf"),
    ],
)
def test_the_command_names_a_file_as_it_was_named(name: str, words: str) -> None:
    assert command(served(replace(RUN, model=name))).startswith(f"llama-server {words} -c 8192 ")


def test_another_type_of_a_named_file_is_another_file() -> None:
    run = replace(RUN, model="Llama-3.1-8B-Instruct-Q4_K_M.gguf")
    assert " -m Llama-3.1-8B-Instruct-Q8_0.gguf " in command(served(run, file_type="Q8_0"))
    run = replace(RUN, model="unsloth/Qwen3-30B-A3B-GGUF")
    assert " -hf unsloth/Qwen3-30B-A3B-GGUF:Q8_0 " in command(served(run, file_type="Q8_0"))


def test_what_it_takes_is_explained_line_by_line() -> None:
    explained = explain(load_model(LLAMA), RUN, A100, load_calibration(A100))
    parts = {line.part: line.num_bytes for line in explained.lines}
    needed = taken(served(), placement(served()), 8192, 1)
    assert parts["kv_cache"] == needed.cache == GiB
    assert parts["activations"] == needed.compute


@pytest.mark.parametrize(
    ("model", "gpu", "asked", "options", "most", "note"),
    [
        (LLAMA, "rtx-3060-12gb", "context", {}, 49408, "is the longest with all layers on the GPU"),
        (LLAMA, "rtx-3060-12gb", "concurrency", {}, 6, "is the most with all layers on the GPU"),
        (LLAMA, "rtx-3060-12gb", "context", {"fit": False}, 57344, "is the longest that starts"),
        (LARGE, "rtx-4090-24gb", "context", {}, 131072, "starts with 21 of 81 layers on the GPU"),
        (LARGE, "rtx-4090-24gb", "concurrency", {}, 1, "is the most with 42 of 81 layers on the"),
        (LARGE, "rtx-4090-24gb", "context", {"n_gpu_layers": 99}, 1, "it starts for no length"),
    ],
)
def test_the_most_says_what_gpus_hold_then(
    model: str, gpu: str, asked: str, options: dict[str, object], most: int, note: str
) -> None:
    """`--fit` lays layers on the host, so that almost anything starts."""
    size: Size = "context" if asked == "context" else "batch_size"
    run = replace(RUN, model=model, serving_options=tuple(sorted({**Q4, **options}.items())))
    (answer,) = estimates.estimate([run], [gpu], maximise=size)
    assert answer.serving
    assert getattr(answer.serving, asked) == most
    assert any(note in each for each in answer.notes)


def test_slots_share_the_longest_context_that_gpus_hold() -> None:
    run = replace(RUN, batch_size=4, serving_options=tuple(Q4.items()))
    (answer,) = estimates.estimate([run], ["rtx-3060-12gb"], maximise="context")
    assert answer.run.context == 12288
    gpu = find_target("rtx-3060-12gb")
    more = predict(load_model(LLAMA), replace(run, context=12544), gpu, load_calibration(gpu))
    assert "with 32 of 33 layers on the GPU; asked for more, it starts" in " ".join(more.notes)


def test_weights_that_exceed_the_gpu_are_not_helped_by_a_shorter_context() -> None:
    gpu = find_target("rtx-4090-24gb")
    fault = start(served(replace(RUN, model=LARGE), gpu, n_gpu_layers=99, **Q4)).fault
    assert fault.endswith("; give fewer n_gpu_layers or fit true, or a smaller file_type")
    gpu = find_target("rtx-3060-12gb")
    fault = start(served(replace(RUN, context=65536), gpu, n_gpu_layers=99, **Q4)).fault
    assert fault.endswith(" a smaller file_type, or a context up to 57344 for one slot")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (Q4, ["weights Q4_K_M *", "weights Q8_0"]),
        ({}, ["weights not quantised *", "weights Q8_0", "weights Q4_K_M"]),
    ],
)
def test_explain_compares_types_of_files(options: dict[str, object], names: list[str]) -> None:
    run = replace(RUN, serving_options=tuple(options.items()))
    explained = explain(load_model(LLAMA), run, A100, load_calibration(A100))
    sheet = methods_sheet(explained, "storage")
    assert list(sheet.columns[1:]) == names
    sizes = [each.prediction.memory.breakdown["weights"] for each in explained.methods]
    assert len(set(sizes)) == len(sizes)


def test_explain_says_why_it_does_not_start_and_what_helps() -> None:
    asked = ["explain", LARGE, "--gpu", "rtx-4090-24gb", "--serving", "llama-cpp"]
    done = CliRunner().invoke(main, [*asked, "--quant", "q4_k_m", "--serving-option", "ngl=99"])
    line = done.output.splitlines()[1]
    assert line.startswith("llama-cpp does not start on rtx-4090-24gb: weights take 39.04 GiB")


def test_a_p100_has_no_times_of_weights_in_blocks() -> None:
    """Its integer products are emulated: it was said to be 2.6 to 3 times as fast as published."""
    p100, p40 = find_target("p100-pcie-16gb"), find_target("p40-24gb")
    why = "p100-pcie-16gb has no products of 8-bit integers"
    assert start(served(RUN, p100, **Q4)).untimed.startswith(why)
    assert not start(served(RUN, p40, **Q4)).untimed
    small = replace(RUN, model="HuggingFaceTB/SmolLM2-135M", precision="fp16")
    assert not start(served(small, p100)).untimed


def test_words_for_the_form_name_the_type_of_the_file() -> None:
    assert (
        form_in_words(replace(RUN, serving_options=(("file_type", "Q4_K_M"),))) == "merged Q4_K_M"
    )
    assert form_in_words(RUN) == "merged 16-bit"


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"quant": "awq-int4"}, {}, "serving: llama-cpp reads GGUF files, got quant awq-int4"),
        (
            {"model": "openai/gpt-oss-20b", "quant": "mxfp4"},
            {},
            "serving: llama-cpp reads GGUF files, got quant mxfp4; use quant none and serving "
            "option file_type, such as MXFP4_MOE",
        ),
        ({"model": "bigscience/bloom-1b1"}, {}, "serving: llama-cpp is not predicted for the arch"),
        (
            {"batch_size": 257},
            {},
            "parallel: llama.cpp has at most 256 slots, got 257; give",
        ),
        ({"precision": "fp32"}, {}, "serving: llama-cpp takes its weights from file_type, got"),
        ({}, {"cache_type_v": "q8_0", "flash_attn": "off"}, "cache_type_v: q8_0 needs flash"),
        (
            {},
            {"file_type": "Q4_K"},
            "file_type: 'Q4_K' is a mix whose types only the file states; give the nearest, Q4_K_M",
        ),
        (
            {"serve": "as-trained", "method": "lora"},
            {},
            "serving: llama-cpp's unmerged adapters are not predicted; use serve merged",
        ),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(
    changed: dict[str, object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        served(replace(RUN, **changed), **options)
    assert str(error.value).startswith(message)


def test_whoever_asks_for_ollama_is_told_what_is_called_how_there() -> None:
    said = other_name_note("Ollama")
    assert said.startswith("Ollama: taken as serving llama-cpp; the command is llama.cpp's.")
    pairs = re.findall(r"(\w+) for (\w+)(?: and (\w+))?", said)
    assert len(pairs) == 6
    for theirs, *ours in pairs:
        named = [option.name for option in ENGINE.options if theirs in option.other_names]
        assert (named or [ENGINE.elsewhere[theirs]]) == list(filter(None, ours))
    assert other_name_note("llama.cpp") == other_name_note("vllm") == ""
    asked = ["estimate", LLAMA, "--phase", "inference", "--gpu", "l40s", "--context", "2048"]
    done = CliRunner().invoke(main, [*asked, "--serving", "ollama"])
    assert said.partition(";")[2].split()[-1] in done.output


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("openai/gpt-oss-20b", {}, ""),
        (
            "openai/gpt-oss-20b",
            {"file_type": "Q8_0"},
            "is stored as mxfp4, and is converted for llama-cpp; file_type MXFP4_MOE keeps it",
        ),
        ("deepseek-ai/DeepSeek-V3", {}, "is stored as fp8, and is converted for llama-cpp"),
    ],
)
def test_a_note_says_what_becomes_of_a_checkpoint(
    model: str, options: dict[str, object], said: str
) -> None:
    run = replace(RUN, model=model, serving_options=tuple(options.items()))
    answer = predict(load_model(model), run, A100, load_calibration(A100))
    found = [note for note in answer.notes if note.startswith("the checkpoint ")]
    assert found == ([f"the checkpoint {said}"] if said else [])


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_a_type_of_files_may_be_named_as_a_quantisation(file_type: str) -> None:
    for quant in (file_type, file_type.lower(), f"gguf-{file_type.lower()}"):
        (run,) = grid({**GRID, "quant": [quant]})
        assert dict(run.serving_options) == {"file_type": file_type}
        assert run.quant is None


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("UD-Q4_K_XL", "Q4_K_M"),
        ("ud-q6_k_xl", "Q6_K"),
        ("UD-Q8_K_XL", "Q8_0"),
        ("UD-IQ1_S", "IQ1_S"),
        ("Q4_K_L", "Q4_K_M"),
    ],
)
def test_a_mix_that_only_its_file_states_is_counted_as_the_nearest(word: str, nearest: str) -> None:
    (run,) = grid({**GRID, "quant": [word], "model": [LLAMA]})
    with pytest.raises(ConfigError, match=f"types only the file states; .* nearest, {nearest}$"):
        resolve(load_model(LLAMA), run, A100)
    job = served(replace(RUN, model=f"unsloth/Qwen3-30B-A3B-GGUF:{word}"))
    assert job.options["file_type"] == nearest
    assert f"-hf unsloth/Qwen3-30B-A3B-GGUF:{word}" in command(job)


@pytest.mark.parametrize(
    ("name", "stored", "whose"),
    [
        ("qwen3:32b", "Q4_K_M", "Ollama's tag means Q4_K_M"),
        ("llama3.1:8b-instruct-fp16", "F16", "Ollama's tag means F16"),
        ("qwen2.5:7b-instruct-bf16", "BF16", "Ollama's tag means BF16"),
        ("gemma3:27b-it-qat", "Q4_0", ""),
        ("unsloth/Qwen3-30B-A3B-GGUF:BF16", "BF16", ""),
        ("Qwen3-8B-F16.gguf", "F16", ""),
        ("gpt-oss:20b", "MXFP4_MOE", ""),
        ("unsloth/Qwen3-30B-A3B-GGUF", "Q4_K_M", "the name states no file, and means Q4_K_M"),
        ("Qwen/Qwen3-32B", None, ""),
    ],
)
def test_a_name_without_a_type_means_the_file_that_is_taken(
    name: str, stored: str | None, whose: str
) -> None:
    model = load_model(name)
    job = resolve(model, replace(RUN, model=model.name), A100)
    assert dict(job.run.serving_options).get("file_type") == stored
    assert whose in " ".join(notes_on(job))
    larger = replace(RUN, model=model.name, serving_options=(("file_type", "Q8_0"),))
    assert "means" not in " ".join(notes_on(resolve(model, larger, A100)))


def test_a_type_that_is_no_quantisation_is_a_precision_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"llama-cpp, or quant none with precision fp16$"):
        list(grid({**GRID, "serving": ["vllm"], "quant": ["F16"]}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"serving": ["vllm"]},
            "quant: q4_k_m is a type of GGUF files, which are llama.cpp's; use",
        ),
        ({"phase": ["finetune"]}, "quant: q4_k_m is a type of GGUF files, which are llama.cpp's;"),
        (
            {"serving_options": [(("file_type", "Q8_0"),)]},
            "quant: q4_k_m, but file_type is Q8_0; give one of them",
        ),
    ],
)
def test_such_a_name_is_refused_where_no_file_is_read(
    changed: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        list(grid({**GRID, "quant": ["q4_k_m"], **changed}))
    assert str(error.value).startswith(message)


# --- steps ------------------------------------------------------------------------------------


def timer(asked: Served) -> StepTimer:
    return step_timer(asked, stepping=stepping(asked), reduction_s=own_all_reduce(0.0, 1))


@pytest.mark.parametrize("name", [RUN.model, "Qwen/Qwen3-30B-A3B"])
def test_a_step_reads_the_file_but_for_its_token_table(name: str) -> None:
    asked = served(replace(RUN, model=name), file_type="Q4_K_M")
    model = asked.model
    read = weight_bytes(asked, None) + sum(
        count * weight_bytes(asked, linear)
        for layer, count in model.layers()
        for linear in layer.linears
    )
    whole = taken(asked, placement(asked), 8192, 1)
    assert read == pytest.approx(whole.layers + whole.output, rel=1e-3)


def test_each_row_of_few_takes_as_long_as_published() -> None:
    """RTX 3090, Llama 3 8B, Q4_0: 6.4 ms for one row, 13.7 ms for eight (pull request 15802)."""
    asked = served(gpu=find_target("rtx-3090-24gb"), file_type="Q4_0")
    one, eight = (
        timer(asked).seconds(Step(decoding=rows, cached_tokens=rows, sampled=rows))
        for rows in (1, 8)
    )
    assert 1e3 * one == pytest.approx(6.39, rel=0.1)
    assert 1e3 * eight == pytest.approx(13.7, rel=0.1)


def test_a_large_batch_is_read_in_micro_batches() -> None:
    def prompt(tokens: int) -> Step:
        pairs = tokens**2 / 2
        return Step(
            decoding=0, cached_tokens=0, prompt_tokens=tokens, prompt_pairs=pairs, sampled=1
        )

    asked = served(file_type="Q4_0")
    assert stepping(asked).max_step_tokens == 2048
    small, large = (timer(asked).parts(prompt(tokens)) for tokens in (512, 2048))
    head_s = timer(asked).parts(prompt(0))["products"]
    assert large["products"] - head_s == pytest.approx(4 * (small["products"] - head_s), rel=1e-3)
    once = timer(served(file_type="Q4_0", ubatch_size=2048)).parts(prompt(2048))
    assert once["products"] < large["products"]


def test_narrow_keys_are_fewer_bytes() -> None:
    wide, narrow = (
        stepping(served(cache_type_k=kind, cache_type_v=kind)).cache_bytes
        for kind in ("f16", "q8_0")
    )
    assert wide == 2
    assert narrow == 34 / 32


def test_a_cpu_alone_is_timed_and_layers_on_the_host_of_a_gpu_are() -> None:
    assert not start(served(gpu=CPU)).untimed
    assert not start(served(n_gpu_layers=20)).untimed
    assert not start(served()).untimed


HYBRID = RunConfig(
    model="Qwen/Qwen3.5-35B-A3B", phase="inference", serving="llama-cpp", context=8192
)


def timer_of(run: RunConfig, **options: object) -> StepTimer:
    asked = served(run, find_target("rtx-5090-32gb"), file_type="Q4_K_M", **options)
    assert not start(asked).untimed
    alone = own_all_reduce(0.0, 1)
    return step_timer(asked, stepping=stepping(asked), reduction_s=alone)


def test_states_of_recurrent_layers_are_read_and_written_twice_in_fp32() -> None:
    """Copied out of the cache, then by their kernel: llama.cpp's build_rs."""
    timer = timer_of(HYBRID)
    (layer,) = {
        attention
        for layer, _ in load_model(HYBRID.model).layers()
        for attention in layer.attentions
        if attention.kind == "linear"
    }
    conv = layer.conv_channels * (layer.conv_kernel - 1)
    states = 30 * 4 * (conv + layer.num_attention_heads * layer.head_dim * layer.v_head_dim)
    alike = [each for each in timer.attentions if each.window == 1]
    read = sum(each.cached_s for each in alike) * timer.bandwidth * timer.rates.cache
    assert read == pytest.approx(4 * states, rel=0.01)


def test_a_prompt_passes_the_delta_rule_token_by_token() -> None:
    timer = timer_of(HYBRID)
    seconds = [
        timer.parts(Step(0, 0, 1, tokens, tokens * tokens / 2))["attention"]
        for tokens in (512, 1024)
    ]
    assert seconds[1] - seconds[0] > 30 * 512 * 0.48e-6  # of 30 layers, beside those that attend


def test_recurrent_layers_have_wider_intervals_than_measured_ones() -> None:
    assert timer_of(HYBRID).deviation > timer_of(replace(HYBRID, model=LLAMA)).deviation
    hosted = served(HYBRID, find_target("rtx-3060-12gb"), file_type="Q4_K_M")
    assert stepping(hosted).hosted is not None
    assert not start(hosted).untimed


def test_a_queue_waits_for_slots() -> None:
    gpu = find_target("rtx-3090-24gb")
    speeds = []
    for num_slots in (1, 4):
        run = replace(
            RUN, batch_size=8, context=2048, prompt_len=500, max_new_tokens=100,
            serving_options=(("file_type", "Q4_K_M"), ("parallel", num_slots)),
        )  # fmt: skip
        answer = predict(load_model(LLAMA), run, gpu, load_calibration(gpu)).serving
        assert answer is not None
        assert answer.time is not None
        speeds.append(answer.time.output_tokens_per_s)
    assert 1.5 < speeds[1] / speeds[0] < 4


def test_ollamas_names_are_those_of_llama_cpp() -> None:
    own = served(batch_size=256, cache_type_k="q8_0", cache_type_v="q8_0", n_gpu_layers=20)
    ollama = served(num_batch=256, OLLAMA_KV_CACHE_TYPE="q8_0", num_gpu=20)
    assert ollama.run == own.run
    assert ollama.options == own.options
    with pytest.raises(ConfigError, match="num_ctx is the setting context; give --context"):
        served(num_ctx=4096)


def test_short_flags_are_its_options() -> None:
    own = served(ubatch_size=256, cache_type_k="q8_0", n_gpu_layers=20, file_type="Q4_K_M")
    short = served(ub=256, ctk="q8_0", ngl=20, file_type="q4_k_m")
    assert short.run == own.run
    assert short.options == own.options
    with pytest.raises(ConfigError, match="ctx_size is the setting context; give --context"):
        served(ctx_size=4096)


def test_a_step_that_has_no_time_says_why() -> None:
    spark, run = find_target("gb10"), replace(RUN, model="deepseek-ai/DeepSeek-V3")
    run = replace(run, serving_options=(("file_type", "Q4_K_M"),))
    prediction = predict(load_model(run.model), run, spark, load_calibration(spark))
    assert prediction.serving is not None
    assert prediction.serving.starts
    assert prediction.serving.time is None
    assert any("is read from the disk again for each token" in note for note in prediction.notes)


# --- several GPUs -----------------------------------------------------------------------------


def two(gib: float = 24, **options: object) -> Served:
    return served(RUN, card(gib), devices=2, **options)


def test_each_gpu_holds_whole_layers_with_their_cache() -> None:
    asked = two()
    placed = placement(asked)
    assert placed.by_device == (17, 16)  # the second has the output matrix, too
    first, second = (taken(asked, placed, 8192, 1, device=device) for device in (0, 1))
    layer = 8192 * 2 * 1024 * 2
    assert (first.cache, second.cache) == (17 * layer, 15 * layer)
    assert first.output == 0
    assert second.output > 128256 * 4096 * 2
    alone = taken(served(RUN, card(24)), Placement(by_device=(33,)), 8192, 1)
    assert first.layers + second.layers == alone.layers


def test_the_fullest_gpu_decides_what_fits() -> None:
    even, uneven = start(two()), start(two(tensor_split="3,1"))
    assert even.stage == 1
    assert uneven.pool.max_context(None) < even.pool.max_context(None)
    longest = uneven.pool.max_context(None)
    fits = served(replace(RUN, context=longest), card(24), devices=2, tensor_split="3,1")
    assert not start(fits).fault
    longer = replace(RUN, context=2 * longest)
    fault = start(served(longer, card(24), devices=2, tensor_split="3,1")).fault
    assert "are free on GPU 0 of 2; give another tensor_split" in fault


def test_fit_leaves_what_a_user_divided() -> None:
    moved = two(8)
    assert placement(moved).layers < 33
    assert not start(moved).fault
    assert placement(two(8, tensor_split="1,1")).by_device == (17, 16)
    assert start(two(7, tensor_split="1,1")).fault


def test_inputs_are_kept_four_times_while_micro_batches_overlap() -> None:
    asked = two()
    overlapping = placement(asked)
    alone = replace(overlapping, overlaps=False)
    inputs = 512 * (4 * 4096 + 2 * 8192)  # states and a mask
    for device in (0, 1):
        more = taken(asked, overlapping, 8192, 1, device=device)
        less = taken(asked, alone, 8192, 1, device=device)
        # nor does anything else lie on them later
        assert 3 * inputs < more.compute - less.compute < 4 * inputs
    assert stepping(asked).passes_at_once == 4


def test_a_card_without_room_for_that_starts_without() -> None:
    run = replace(RUN, context=32768)
    asked = served(run, card(24), devices=2, fit=False)
    placed = placement(asked)
    alone = replace(placed, overlaps=False)
    lacking = max(taken(asked, alone, 32768, 1, device=device).device for device in (0, 1))
    tight = served(run, card((lacking + 1e6) / GiB), devices=2, fit=False)
    assert not placement(tight).overlaps
    assert not start(tight).fault
    assert stepping(tight).passes_at_once == 1
    assert any("do not overlap" in line for line in notes(tight, start(tight)))


def test_a_token_takes_as_long_on_two_gpus_and_a_long_prompt_less() -> None:
    def at(count: int, prompt_len: int) -> ServingTime:
        run = replace(RUN, prompt_len=prompt_len, max_new_tokens=64, context=16384)
        options = {"devices": count, "file_type": "Q4_K_M"}
        run = replace(run, serving_options=tuple(options.items()))
        gpu = find_target("rtx-4090-24gb")
        serving = predict(load_model(LLAMA), run, gpu, load_calibration(gpu)).serving
        assert serving is not None
        assert serving.time is not None
        return serving.time

    assert at(2, 256).tpot_s == pytest.approx(at(1, 256).tpot_s, rel=0.03)
    assert at(2, 256).ttft_s == pytest.approx(at(1, 256).ttft_s, rel=0.05)
    # published of two such cards: 1.60 times as fast in 4096 tokens, 1.71 in 8192
    assert at(1, 8192).ttft_s / at(2, 8192).ttft_s == pytest.approx(1.71, rel=0.15)


def test_split_mode_none_leaves_the_others_empty() -> None:
    asked = two(split_mode="none", main_gpu=1)
    assert placement(asked) == Placement(by_device=(33,))
    assert notes(asked, start(asked))[1] == "split_mode none: GPU 1 of 2 has everything"
    assert stepping(asked).stage_layers == ()


def test_the_command_names_the_gpus() -> None:
    run = replace(RUN, serving_options=(("devices", 2), ("tensor_split", "3/1")))
    asked = resolve(load_model(LLAMA), run, A100).served
    assert command(asked).endswith("-c 8192 -np 1 --device CUDA0,CUDA1 --tensor-split 3/1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_mode": "row"}, "row was removed from llama.cpp's CUDA backend"),
        ({"split_mode": "tensor"}, "tensor is experimental in llama.cpp, and not predicted"),
        ({"tensor_split": "1,2,3"}, "1,2,3 for 2 GPUs; give a proportion of each, such as 1/1"),
        ({"tensor_split": "a"}, "a for 2 GPUs"),
        ({"tensor_split": "0,0"}, "0,0 for 2 GPUs"),
        ({"main_gpu": 2}, "2 of 2 GPUs; they are numbered from 0"),
    ],
)
def test_ways_to_divide_that_fail_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        two(**options)
