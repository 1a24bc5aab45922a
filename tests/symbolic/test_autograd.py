"""The tape: what lives when, by hand on a few operators, and one layer against its closed form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from written_layers import points_of_layer

from whichlora.memory import inference
from whichlora.memory.activations import kept_mask_bytes
from whichlora.memory.embeddings import masked_head_saved
from whichlora.memory.training import trained_params
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model
from whichlora.symbolic import linear_form
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import Assigned
from whichlora.symbolic.layer import LayerPoints, block_events
from whichlora.symbolic.linear_form import (
    LinearForm,
    constant,
    evaluate,
    most,
    per_rank_sequence,
    per_sequence,
    per_span,
    per_token,
    plus,
    unpacked,
    where_many_rows,
)

GPU = GpuSpec(
    key="a",
    name="A",
    kind="cuda",
    memory_bytes=2**36,
    bandwidth_bytes_per_s=1e12,
    peak_flops_per_s={"bf16": 1e14, "fp32": 1e13},
    compute_capability="8.0",
)
SIZES = {"tokens": 2048, "span": 2048, "r": 16}


def bytes_of(form: LinearForm) -> int:
    return int(evaluate(form, tokens=1, span=1, r=1))


def test_a_tensor_behind_a_prefix_gets_a_view_of_the_gradient() -> None:
    tape = Tape()
    x = tape.input(per_token(4), 2, needs_grad=True)
    made = tape.op([x], x.elements, 2)
    tape.behind(made, plus(per_token(4), per_sequence(8)), 2)
    # of 10 tokens: the gradient of all, which the prefix holds to the end, and that of the input
    whole, of_input = 2 * (40 + 8), 2 * 40
    points = tape.backward(recomputed=False)
    assert most(points, tokens=10, span=10, r=1) == whole + of_input


def test_tensors_that_are_joined_get_views_of_one_gradient() -> None:
    tape = Tape()
    x = tape.input(per_token(4), 2, needs_grad=True)
    tape.concatenate([tape.op([x], per_token(3), 2), tape.op([x], per_token(5), 2)], per_token(8))
    points = [bytes_of(one) for one in tape.backward(recomputed=False)]
    # all of it until both parts have gone on, each with a gradient for the input
    assert max(points) == 2 * (8 + 4 + 4)


def test_a_tensor_lives_until_its_last_reader_unless_a_name_holds_it() -> None:
    tape = Tape()
    x = tape.input(per_token(1), 2, needs_grad=False)
    wide = tape.op([x], per_token(100), 2)
    narrow = tape.op([wide], per_token(1), 2)
    tape.op([narrow], per_token(10), 2)
    points = tape.forward(saving=False)
    assert [bytes_of(one) for one in points] == [200, 202, 22]
    tape.hold(wide)
    points = tape.forward(saving=False)
    assert [bytes_of(one) for one in points] == [200, 202, 222, 200]


def births_and_deaths(events: Iterable[tuple[int, LinearForm | None]]) -> list[int]:
    """Bytes of what is born, and minus those of what dies."""
    sizes: dict[int, int] = {}
    changes = []
    for tensor, form in events:
        if form is not None:
            sizes[tensor] = bytes_of(form)
        changes.append(sizes[tensor] if form is not None else -sizes.pop(tensor))
    return changes


def test_what_a_variable_named_goes_when_its_next_value_is_there() -> None:
    tape = Tape(no_grad=True)
    x = tape.input(per_token(1), 1, needs_grad=False)
    named = [Assigned("slice", constant(size)) for size in (30, 20, 7)]
    result = tape.op([x], per_token(2), 1, inner=[constant(100), *named])
    tape.returns(result)
    events = block_events(tape).forward
    assert births_and_deaths(events) == [100, 30, 20, -30, 7, -20, 2, -100, -7]
    assert (
        max(bytes_of(point) for point in tape.forward(saving=False)) == 100 + 30 + 20
    )  # then the result


def test_a_variable_that_lets_go_names_one_tensor_at_a_time() -> None:
    tape = Tape(no_grad=True)
    x = tape.input(per_token(1), 1, needs_grad=False)
    named = [Assigned("slice", form) for form in (constant(30), None, constant(20), None)]
    tape.returns(tape.op([x], per_token(2), 1, inner=named))
    assert births_and_deaths(block_events(tape).forward) == [30, -30, 20, -20, 2]


def test_sums_in_fp32_come_before_temporaries_and_are_cast_behind_them() -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    weight = tape.weight(constant(50), 4, trained=True)
    result = tape.op([x, weight], constant(1), 4, inner_backward=[constant(300)], sums_wide=True)
    tape.returns(result)
    of_sums, of_cast = [40, 200], [20]
    events = block_events(tape).backward
    assert births_and_deaths(events[:-1]) == [*of_sums, 300, *of_cast, -40, -300]
    points = [bytes_of(point) for point in tape.backward(recomputed=False)]
    assert max(points) == 4 + sum(of_sums) + 300 + sum(of_cast)


@pytest.mark.parametrize(("saving", "peak"), [(True, 12 + 2), (False, 12)])
def test_a_graph_holds_what_it_saved_where_anything_is_saved(saving: bool, peak: int) -> None:
    tape = Tape()
    tape.input(per_token(1), 1, needs_grad=False)
    identity = tape.op([], per_token(5), 1)
    product = tape.op([identity], per_token(7), 1)
    tape.op([product], per_token(2), 1)
    tape.hold(identity, by_graph=True)
    assert max(bytes_of(point) for point in tape.forward(saving=saving)) == peak


def test_what_needs_no_gradient_is_not_kept() -> None:
    for needs_grad, kept in ((False, 0), (True, 20)):
        tape = Tape()
        x = tape.input(per_token(10), 2, needs_grad=needs_grad)
        y = tape.op([x], per_token(10), 2)
        tape.op([y], per_token(10), 2, saves=[y])
        assert bytes_of(tape.saved) == kept


@pytest.mark.parametrize(
    ("reshapes", "points"), [(False, [2, 42, 60, 60]), (True, [2, 42, 60, 60, 60])]
)
def test_a_gradient_is_added_to_the_one_that_waits_unless_that_is_a_view(
    reshapes: bool, points: list[int]
) -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    y, z = (tape.op([x], per_token(10), 2, reshapes=reshapes) for _ in range(2))
    tape.op([y, z], per_token(1), 2)
    # 2 of the result, 20 of each branch, each turned into one of x; a sum of its own is a third
    assert [bytes_of(one) for one in tape.backward(recomputed=False)] == points


def test_recomputation_stops_at_the_last_tensor_that_is_asked_for_with_its_names_held() -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    held = tape.op([x], per_token(30), 2)
    saved = tape.op([held], per_token(5), 2)
    last = tape.op([saved], per_token(10), 2, saves=[saved])
    tape.hold(held)
    early = [bytes_of(one) for one in tape.backward(recomputed=True)]
    full = [bytes_of(one) for one in tape.backward(recomputed=True, early_stop=False)]
    assert bytes_of(last.form) == 20
    assert max(early) == 20 + 60 + 10  # the gradient, the held name, the saved tensor
    # a reentrant checkpoint names its result and the gradient of it to the end
    assert max(full) == 20 + bytes_of(last.form) + 60 + 20


@pytest.mark.parametrize(("early_stop", "left"), [(True, 1000 + 30), (False, 1000)])
def test_keys_that_later_layers_hold_keep_the_graph_that_made_them_again(
    early_stop: bool, left: int
) -> None:
    tape = Tape()
    x = tape.input(per_token(1), 1, needs_grad=True)
    query = tape.op([x], per_token(5), 1, saves_result=True)
    normed = tape.op([x], per_token(30), 1, saves_result=True)
    key = tape.op([normed], per_token(1000), 1)
    tape.hold_for_later_layers(key)
    tape.op([query, key], per_token(7), 1, saves_result=True)
    assert bytes_of(tape.held_by_later_layers) == 1000
    assert bytes_of(tape.graph_behind_held) == 30  # not what the query's node saved
    walk = tape.backward_walk(recomputed=True, early_stop=early_stop)
    # the gradient of the input, and what a reentrant checkpoint holds of its result
    assert bytes_of(unpacked(walk.live, 0, 0)) == left + (1 if early_stop else 1 + 7)
    alive = {tensor for tensor, form in walk.events if form is not None}
    alive -= {tensor for tensor, form in walk.events if form is None}
    assert alive == {walk.input_gradient}


def test_what_is_written_over_takes_no_room_but_a_gradient_of_its_own() -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    y = tape.op([x], per_token(10), 2)
    tape.in_place(y)
    points = tape.forward(saving=True)
    assert [bytes_of(one) for one in points] == [20, 20]
    assert max(bytes_of(one) for one in tape.backward(recomputed=False)) == 20 + 20


@pytest.mark.parametrize(("recomputed", "before_cast"), [(False, 20), (True, 0)])
def test_a_checkpoint_frees_what_a_product_saved_before_its_gradient_is_cast(
    recomputed: bool, before_cast: int
) -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    wide, narrow = (tape.op([x], per_token(10), size) for size in (4, 2))
    tape.op(
        [narrow, wide],
        per_token(10),
        4,
        saves=[wide, narrow],
        inner_backward=per_token(40),
        casts_gradients=per_token(20),
    )
    peak = max(bytes_of(one) for one in tape.backward(recomputed=recomputed))
    assert peak == 40 + 20 + 40 + (40 + 40) + before_cast  # saved, the result's, two in fp32


@pytest.mark.parametrize(("accumulated", "left"), [(False, 1000), (True, 0)])
def test_gradients_of_parameters_stay_unless_they_are_added_to_earlier_ones(
    accumulated: bool, left: int
) -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    weight = tape.weight(constant(500), 2, trained=True)
    y = tape.op([x], per_token(10), 2)
    y = tape.op([y, weight], per_token(10), 2, saves=[y])
    tape.op([y], per_token(10), 2)
    points = [bytes_of(one) for one in tape.backward(recomputed=False, accumulated=accumulated)]
    assert max(points) == 20 + 20 + 20 + 1000  # saved, two gradients and the parameter's
    assert points[-1] == 20 + 20 + left  # the last operator reads one and makes one


def test_a_4_bit_product_of_many_rows_expands_its_weight() -> None:
    form = where_many_rows(7, fused_rows=32)
    few, many = (evaluate(form, tokens=n, span=1, r=1) for n in (32, 33))
    assert (few, many) == (0, 7)


def test_what_reads_an_encoder_grows_with_sequences_and_rank_not_with_tokens() -> None:
    form = per_rank_sequence(1500)
    assert [evaluate(form, tokens=4 * n, span=n, r=8) for n in (1, 50)] == [4 * 1500 * 8] * 2


def test_what_all_sequences_share_grows_with_the_length_of_one() -> None:
    form = plus(per_span(300), per_span(0))
    assert [evaluate(form, tokens=4 * n, span=n, r=8) for n in (1, 50)] == [300, 300 * 50]
    many = np.arange(1, 99), np.arange(1, 99)[:, None]
    with patch.object(linear_form, "COMPARED_FROM", 0):
        largest = most([form, constant(9000)], tokens=many[0] * many[1], span=many[1], r=1)
    assert largest[:, 0].tolist() == [max(9000, 300 * n) for n in range(1, 99)]


def test_a_llama_layer_under_autocast_keeps_and_needs_the_closed_form() -> None:
    spec = find_model("meta-llama/Meta-Llama-3-8B")
    assert spec is not None
    job = resolve(spec, RunConfig(model=spec.name), GPU)
    layer = spec.groups[0].layer
    points = points_of_layer(layer, job)
    # 217,448 bytes per token, and the 16-bit copies of the adapters
    assert layer.mlp is not None
    copies = 2 * sum(one.in_features + one.out_features for one in layer.linears) * 16
    kept = evaluate(points.saved, **SIZES)
    assert kept == 217_448 * 2048 + copies
    # checkpointed: the recomputed layer's names are still held when its first gradients come
    hidden, width = spec.hidden_size, layer.mlp.width
    recomputed = points_of_layer(layer, job, checkpointed=True).backward
    transient = most(recomputed, **SIZES) - kept
    assert transient / 2048 == pytest.approx(6 * width + 10 * hidden, rel=0.005)


@pytest.mark.parametrize(
    ("settings", "dense_bytes"),
    [
        ({}, 0),
        ({"lora_dropout": 0.1}, 2),  # cast for autocast
        ({"lora_dropout": 0.1, "precision": "bf16-pure"}, 0),  # the parameter itself
        ({"lora_dropout": 0.1, "precision": "fp32", "quant": "nf4"}, 4),  # expanded
    ],
    ids=str,
)
def test_dora_with_dropout_keeps_a_weight_that_is_no_parameter(
    settings: dict[str, object], dense_bytes: int
) -> None:
    spec = find_model("TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    assert spec is not None
    run = RunConfig(model=spec.name, method="dora", target_modules=("q_proj",), **settings)  # type: ignore[arg-type]
    kept = points_of_layer(spec.groups[0].layer, resolve(spec, run, GPU)).saved_tensors
    dense = [one.form.constant for one in kept if one.form.constant >= spec.hidden_size**2]
    assert dense == [spec.hidden_size**2 * dense_bytes] * bool(dense_bytes)


def test_experts_in_a_loop_keep_the_same_and_need_less_at_once() -> None:
    spec = find_model("mistralai/Mixtral-8x7B-v0.1")
    assert spec is not None
    found = {}
    for transformers in ("4.44.2", "5.23.0"):
        run = RunConfig(
            model=spec.name,
            precision="bf16-pure",
            target_modules=("attention",),
            attn="flash_attention_2",  # SDPA of the older one repeats keys
            libraries=(("transformers", transformers),),
        )
        job = resolve(spec, run, GPU)
        layer = job.model.groups[0].layer
        assert layer.moe is not None
        assert layer.moe.one_by_one == (transformers == "4.44.2")
        points = points_of_layer(layer, job)
        saved = evaluate(points.saved, **SIZES)
        found[transformers] = saved, most(points.backward, **SIZES) - saved
    (looped, one), (grouped, all_at_once) = found.values()
    assert looped == pytest.approx(grouped, rel=0.01)
    assert one < all_at_once / 2


def seq2seq_points(name: str, **settings: object) -> tuple[LayerPoints, LayerPoints]:
    """The padded layers of the encoder and of the decoder, in pure bf16."""
    spec = find_model(name)
    assert spec is not None
    run = RunConfig(model=spec.name, precision="bf16-pure", **settings)  # type: ignore[arg-type]
    job = resolve(spec, run, GPU)
    encoder, decoder = spec.groups[0].layer, spec.groups[-1].layer
    return points_of_layer(encoder, job, masked=True), points_of_layer(decoder, job, masked=True)


def test_padding_masks_the_encoder_and_what_reads_it_but_not_the_decoder_itself() -> None:
    per_pair = [points.saved[1] for points in seq2seq_points("facebook/bart-large")]
    assert per_pair == [
        2,
        2,
    ]  # bytes of one additive mask each, the decoder's for its cross attention


def test_a_position_bias_grows_to_every_sequence_where_it_meets_a_padding_mask() -> None:
    encoder, decoder = seq2seq_points("google-t5/t5-large")
    heads = 16
    assert encoder.saved[1] == 2 * heads
    # the decoder's own bias stays one for the whole batch; that of its cross attention does not
    assert (decoder.saved[1], decoder.saved[5]) == (2 * heads, 2 * heads)


@pytest.mark.parametrize(
    ("name", "width", "of_transform"),
    [("google-bert/bert-base-uncased", 768, 768), ("google/electra-base-discriminator", 768, 768)],
)
def test_an_adapter_of_all_linears_of_an_encoder_reaches_the_matrix_before_its_logits(
    name: str, width: int, of_transform: int
) -> None:
    spec = find_model(name)
    assert spec is not None
    job = resolve(spec, RunConfig(model=name, r=4), GPU)
    in_layers = sum(
        linear.in_features + linear.out_features
        for layer, count in spec.layers()
        for linear in layer.linears * count
    )
    found = trained_params(spec, job.targets, job.method, 4)
    assert found == 4 * (in_layers + width + of_transform)


def test_a_head_for_masked_words_keeps_more_where_it_is_adapted() -> None:
    spec = find_model("google-bert/bert-base-uncased")
    assert spec is not None
    kept = []
    for targets in (("all-linear",), ("query",)):
        run = RunConfig(model=spec.name, precision="bf16-pure", r=8, target_modules=targets)
        job = resolve(spec, run, GPU)
        tensors = masked_head_saved(spec, job.targets, job.dtypes, job.method, r=8)
        kept.append(sum(one.per_token for one in tensors))
    hidden = spec.hidden_size
    frozen = 2 * 2 * hidden + 2 * 4  # inputs of the GELU and of the norm, mean and deviation
    assert kept == [frozen + 2 * hidden + 2 * 8, frozen]


def test_an_encoder_decoder_reads_its_prompt_before_it_has_a_cache() -> None:
    spec = find_model("google/flan-t5-large")
    assert spec is not None
    run = RunConfig(
        model=spec.name, phase="inference", batch_size=8, prompt_len=512, max_new_tokens=4
    )
    moments = ledger(resolve(spec, run, GPU)).moments
    parts = {name: {entry.part for entry in moments[name]} for name in moments}
    assert "kv_cache" not in parts["prefill"]
    assert "kv_cache" in parts["first_token"]
    output = 2 * 8 * 512 * spec.hidden_size
    for name in ("first_token", "first_logits", "decode"):
        assert [x.num_bytes for x in moments[name] if x.fact is inference.ENCODED] == [output]


def test_deberta_keeps_its_projected_positions_once_per_sequence() -> None:
    spec = find_model("microsoft/deberta-v3-base")
    assert spec is not None
    job = resolve(spec, RunConfig(model=spec.name, precision="bf16-pure"), GPU)
    kept = points_of_layer(spec.groups[0].layer, job).saved_tensors
    for sequences, span in ((1, 64), (4, 64), (4, 128)):
        repeated = sum(
            evaluate(one.form, tokens=sequences * span, span=span, r=8)
            for one in kept
            if one.what == "projected positions, repeated"
        )
        assert repeated == sequences * 2 * 2 * spec.hidden_size * 512


def test_zeros_of_cross_attention_are_shared_only_where_no_padding_mask_joins_them() -> None:
    spec = find_model("google-t5/t5-small")
    assert spec is not None
    sizes = {"tokens": 128, "span": 64, "checkpointed": False}
    kept = {}
    for padding in ("none", "padded"):
        run = RunConfig(model=spec.name, precision="bf16-pure", padding=padding)
        dtypes = resolve(spec, run, GPU).dtypes
        kept[padding] = kept_mask_bytes(spec, dtypes, **sizes)
    assert kept == {"none": 2 * 8 * 64 * 64, "padded": 0}  # bf16, eight heads


def test_what_a_caller_holds_lives_to_the_end_of_a_forward() -> None:
    points = []
    for held in (False, True):
        tape = Tape()
        x = tape.input(per_token(1), 2, needs_grad=False)
        wide = tape.op([x], per_token(10), 2)
        narrow = tape.op([wide], per_token(1), 2)
        if held:
            tape.hold_to_end(wide)
        tape.op([narrow], per_token(5), 2)
        found = tape.forward(saving=False)
        points.append(found[-1])
    assert points == [per_token(2 + 10), per_token(2 + 10 + 20)]


def test_a_cache_that_a_block_fills_lacks_its_keys_until_they_are_made() -> None:
    tape = Tape(no_grad=True)
    x = tape.input(per_token(1), 1, needs_grad=False)
    normed = tape.op([x], per_token(50), 1)
    keys = tape.op([normed], per_token(8), 1)
    tape.hold(keys)
    tape.cached(keys, keys.elements, written=True)
    tape.cached(keys, keys.elements, written=False)  # read by a later layer
    tape.op([keys], per_token(4), 1)
    filled, filling = (
        [bytes_of(point) for point in tape.forward(saving=False, fills_cache=fills)]
        for fills in (False, True)
    )
    # while it is made, it is not there; as it is copied, both are
    assert [full - less for full, less in zip(filled, filling, strict=True)] == [8, 8, 0, 0]


def test_a_name_that_is_bound_again_lets_go_of_what_it_held() -> None:
    tape = Tape()
    x = tape.input(per_token(1), 2, needs_grad=False)
    for width in (100, 50):
        weights = tape.op([x], per_token(width), 2)
        tape.op([weights], per_token(5), 2)
        tape.hold_to_end(weights, name="attention weights")
    tape.op([x], per_token(10), 2)
    points = tape.forward(saving=False)
    # 200 wait for the second 100, which live to the end
    assert [bytes_of(one) for one in points] == [200, 210, 300, 310, 300, 120]


def test_what_dropout_makes_of_wide_attention_weights_lives_as_long_as_its_name() -> None:
    spec = find_model("google-t5/t5-base")
    assert spec is not None
    run = RunConfig(model=spec.name, attn="eager", batch_size=4, seq_len=1536, r=8)
    decoder = points_of_layer(spec.groups[-1].layer, resolve(spec, run, GPU), checkpointed=True)
    sizes = {"tokens": 4 * 1536, "span": 1536, "r": 8}
    scores = 4 * 12 * 1536**2
    # both attentions: softmax 4, what dropout made of it 4, its mask 1, the 16-bit copy 2
    recomputed = most(decoder.backward, **sizes)
    assert 22 * scores < recomputed < 26 * scores


def test_one_key_head_of_falcon_is_copied_out_of_the_projection_that_backward_then_spares() -> None:
    spec = find_model("tiiuae/falcon-7b")
    assert spec is not None
    run = RunConfig(
        model=spec.name, attn="flash_attention_2", precision="bf16-pure", r=8, seq_len=1024
    )
    run = replace(run, gradient_checkpointing=False)
    layer = points_of_layer(spec.groups[-1].layer, resolve(spec, run, GPU), masked=False)
    sizes = {one.what: bytes_of(one.form) for one in layer.saved_tensors}
    assert "query_key_value: result" not in sizes
    assert sizes["copy"] == 2 * 64  # the value's head; the key's is rotated


@pytest.mark.parametrize(("activation", "kept"), [("gelu_new", 4), ("gelu_fast", 7)])
def test_a_gelu_keeps_what_its_python_code_multiplies(activation: str, kept: int) -> None:
    spec = find_model("EleutherAI/gpt-neox-20b")
    assert spec is not None
    run = RunConfig(
        model=spec.name, precision="bf16-pure", target_modules=("attention",), r=8, seq_len=1024
    )
    job = resolve(spec, run, GPU)
    layer = spec.groups[-1].layer
    assert layer.mlp is not None
    layer = replace(layer, mlp=replace(layer.mlp, activation=activation))
    width = 2 * layer.mlp.width
    found = sum(
        bytes_of(one.form) == width
        for one in points_of_layer(layer, job, masked=False).saved_tensors
    )
    assert found == kept


def test_events_free_what_they_make_but_for_what_outlives_the_block() -> None:
    tape = Tape()
    x = tape.input(per_token(10), 2, needs_grad=True)
    weight = tape.weight(constant(500), 2, trained=True)
    y = tape.op([x], per_token(20), 2, inner=[per_token(1), per_token(2)])
    z = tape.op([y, weight], per_token(30), 2, saves=[y])
    tape.returns(z)
    events = block_events(tape)
    alive: set[int] = set()
    for tensor, form in events.forward:
        alive.add(tensor) if form is not None else alive.remove(tensor)
    assert alive == {y.storage, events.result}
    assert events.saved == {y.storage}
    alive |= {events.result_gradient}
    for tensor, form in events.backward:
        alive.add(tensor) if form is not None else alive.remove(tensor)
    assert alive == {events.result, events.input_gradient, *events.parameters}
    assert len(events.parameters) == 1


def test_a_weight_that_layers_share_is_one_and_its_gradient_is_there_before() -> None:
    tape = Tape()
    x = tape.input(per_token(8), 2, needs_grad=True)
    bank = tape.shared_weight("bank", constant(100), 4)
    assert tape.shared_weight("bank", constant(100), 4) is bank
    assert tape.gathered == constant(400)  # though it is read twice
    read = tape.op([bank], constant(100), 4)
    result = tape.op([x, read], per_token(8), 2, saves=[read])
    tape.returns(result)
    walk = tape.backward_walk(recomputed=False)
    assert walk.parameters == []  # its part is added to what later layers have left
    assert len(walk.gathered) == 1
    assert Tape(no_grad=True).shared_weight("bank", constant(100), 4).needs_grad is False
