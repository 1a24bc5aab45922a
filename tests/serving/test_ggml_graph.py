"""The layout of ggml's buffer; its size for 19 models is in tests/benchmarks."""

from __future__ import annotations

from dataclasses import replace

from whichlora.serving import ggml_graph
from whichlora.serving.ggml_backends import CPU
from whichlora.serving.ggml_buffer import HOST, Graph
from whichlora.serving.ggml_graph import Batch, LayerPlace
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.spec.architecture import ModelSpec
from whichlora.store.hub import load_model

LLAMA = load_model("meta-llama/Llama-3.1-8B")
BATCH = Batch(tokens=512, outputs=1, cells=((None, 8192),))


def compute_bytes(model: ModelSpec, batch: Batch, *, reads_tokens: bool = False) -> int:
    return ggml_graph.compute_bytes(model, batch, architecture_of(model), reads_tokens=reads_tokens)


def test_a_dense_layer_takes_three_widths_of_its_mlp_and_three_hidden_states() -> None:
    hidden, mlp, numbers = 4096, 14336, 4 + 8 + 8
    # gate, up and their product; the stream, and gaps that inputs and norms have left
    expected = 512 * (4 * (3 * mlp + 3 * hidden) + 2 * 8192 + numbers)
    assert compute_bytes(LLAMA, BATCH) == expected + 128  # one number of a row, padded


def test_rows_of_logits_count_once_they_are_larger_than_a_layer() -> None:
    few, many = compute_bytes(LLAMA, replace(BATCH, outputs=4)), replace(BATCH, outputs=512)
    assert few == compute_bytes(LLAMA, BATCH)
    assert compute_bytes(LLAMA, many) > 512 * LLAMA.vocab_size * 4 > few


def test_masks_grow_with_the_context_and_scores_without_flash_attention() -> None:
    longer = replace(BATCH, cells=((None, 16384),))
    assert compute_bytes(LLAMA, longer) - compute_bytes(LLAMA, BATCH) == 8192 * 512 * 2
    eager = compute_bytes(LLAMA, replace(BATCH, flash=False))
    assert eager > 32 * 8192 * 512 * 4


def test_a_cache_in_blocks_is_widened_behind_the_attention() -> None:
    long = replace(BATCH, cells=((None, 131072),))
    widened = replace(long, widened_keys=1, widened_values=1)
    assert compute_bytes(LLAMA, widened) - compute_bytes(LLAMA, long) > 131072 * 1024 * 2


def test_copies_of_what_the_host_holds_come_on_top() -> None:
    largest = 2 * 14336 * 4096 * 2
    on_host = LayerPlace(HOST, elsewhere=(("ffn_down", HOST, largest),), cached=(1, 1))
    places = (on_host, *[LayerPlace(0)] * 31)
    assert compute_bytes(LLAMA, replace(BATCH, places=places)) > largest
    assert compute_bytes(LLAMA, replace(BATCH, places=(LayerPlace(0),) * 32)) < largest


def test_a_copy_serves_all_that_a_gpu_reads_of_it() -> None:
    graph = Graph()
    given = graph.add(1024, place=HOST)
    first = graph.add(256, given)
    graph.add(256, first, given)
    assert graph.buffer_bytes(128) == 1024 + 2 * 256
    assert graph.buffer_bytes(128, copies=4) == 4 * 1024 + 2 * 256
    assert graph.buffer_bytes(128, place=1) == 0


def test_what_lies_on_a_larger_tensor_gives_the_rest_back() -> None:
    graph = Graph()
    first = graph.add(1024, graph.add(128))
    over = graph.add(256, first, over=(first,))
    graph.add(768, over)  # behind it, where the rest was
    assert graph.buffer_bytes(128) == 128 + 1024


def test_values_that_are_cached_for_a_kernel_which_is_lacking_are_turned_in_a_copy() -> None:
    eager = replace(BATCH, flash=False, tokens=128, cells=((None, 16384),))
    more = compute_bytes(LLAMA, replace(eager, turns_values=True)) - compute_bytes(LLAMA, eager)
    rows = 8 * 128 * (1024 - 1)  # a number of each element is one of each token
    assert more == 2 * 16384 * 1024 - rows


def test_what_another_gpu_reads_stays_until_it_is_copied() -> None:
    graph = Graph()
    given = graph.add(128, place=HOST)
    first = graph.add(512, given)
    graph.place = 1
    graph.add(512, first)
    assert graph.buffer_bytes(128, place=0) == 128 + 512
    assert graph.buffer_bytes(128, place=1) == 2 * 512


def test_a_cpu_looks_tokens_up_in_the_same_buffer() -> None:
    on_cpu = compute_bytes(LLAMA, replace(BATCH, backend=CPU), reads_tokens=True)
    assert on_cpu - compute_bytes(LLAMA, BATCH) == 512 * (4 * 4096 + 4) - 96  # row numbers padded
