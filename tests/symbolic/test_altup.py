"""A stream of several hidden states on the tape, and what of it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from written_layers import points_of_layer

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.memory.step import TrainingStep
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.symbolic.altup import expanding_points, merging_points
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.linear_form import evaluate, per_token
from whichlora.timing import serving_work, work
from whichlora.timing.running import RunningModel

HIDDEN, STATES, LAYERS = 64, 4, 4
SMALL = {
    "model_type": "gemma3n_text",
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
}
GPU = find_gpu("h100-sxm-80gb")


def job_of(*, changes: dict[str, Any] | None = None, **settings: Any) -> ResolvedRun:
    run = RunConfig(model="x", batch_size=1, seq_len=32, **settings)
    return resolve(build(SMALL | (changes or {}), name="x"), run, GPU)


def training(job: ResolvedRun) -> TrainingStep:
    run = job.run
    return TrainingStep(
        model=job.model,
        run=run,
        dtypes=job.dtypes,
        method=job.method,
        gpu=job.gpu,
        targets=job.targets,
        trainer=job.trainer,
        batch_size=run.batch_size,
        seq_len=run.seq_len,
        r=run.r,
    )


@pytest.mark.parametrize(("precision", "element_bytes"), [("bf16", 4), ("bf16-pure", 2)])
def test_a_checkpoint_is_of_all_states_which_autocast_makes_fp32(
    precision: str, element_bytes: int
) -> None:
    job = job_of(precision=precision, gradient_checkpointing=True)
    assert job.model.stream_width == STATES * HIDDEN
    groups = training(job).passes.groups[:LAYERS]
    sizes = [int(group.num_bytes) // group.count for group in groups]
    assert sizes == [32 * STATES * HIDDEN * element_bytes] * len(groups)


def test_a_sum_over_a_view_copies_the_gradient_of_the_whole_and_of_the_part() -> None:
    tape = Tape()
    whole = tape.input(per_token(STATES), 4, needs_grad=True)
    made = tape.op([whole], whole.elements, 4)
    added = tape.op([whole], per_token(1), 4)
    summed = tape.write_view(made, added, per_token(STATES - 1))
    assert summed.storage == made.storage
    tape.returns(summed)
    points = [point.per_token for point in tape.backward(recomputed=False)]
    # the gradient that comes, its copy, that of three states, and their sum
    assert max(points) == 4 * (STATES + STATES + (STATES - 1) + 1)


def test_gradients_of_stacked_tensors_are_views_of_its_own() -> None:
    tape = Tape()
    x = tape.input(per_token(1), 4, needs_grad=True)
    states = [tape.op([x], x.elements, 4) for _ in range(STATES)]
    tape.returns(tape.stack(states))
    points = [point.per_token for point in tape.backward(recomputed=False)]
    assert max(points) == 4 * (STATES + 2)  # and of two states what goes on to their input


def test_an_assigned_slice_hands_its_gradient_on_without_a_tensor_in_the_forward() -> None:
    tape = Tape()
    x = tape.input(per_token(STATES), 4, needs_grad=True)
    made = tape.op([x], x.elements, 4)
    (view,) = tape.parts(made, (per_token(1),))
    before = tape.num_storages
    assert tape.write_view(made, view, per_token(1), replaces=True).storage == made.storage
    assert tape.num_storages == before


def test_without_gradients_a_view_is_written_and_nothing_else() -> None:
    tape = Tape(no_grad=True)
    x = tape.input(per_token(2), 4, needs_grad=False)
    assert tape.write_view(x, x) is x


def test_a_stream_of_one_state_has_no_points_around_its_layers() -> None:
    job = job_of()
    one_state = replace(job.model, streams=None)
    for points in (expanding_points, merging_points):
        assert points(one_state, job.targets, job.dtypes) is None
        assert points(job.model, job.targets, job.dtypes, job.method) is not None
    moments = ledger(job).moments
    assert {"merging_forward", "merging_backward", "expanding_backward"} <= set(moments)


def test_what_the_loop_over_layers_names_is_every_state_and_a_projection() -> None:
    job = job_of(precision="bf16-pure", phase="inference", prompt_len=32, max_new_tokens=1)
    points = expanding_points(job.model, (), job.dtypes)
    assert points is not None
    assert points.named_bytes == 2 * HIDDEN * (STATES + 1)
    assert points.saved_tensors == points.backward == ()


def test_adapters_before_the_first_layer_let_a_gradient_through_it() -> None:
    everywhere, inside = (
        training(job_of(gradient_checkpointing=False, target_modules=(names,)))
        for names in ("all-linear", "attention")
    )
    assert everywhere.gives_input_gradient
    assert not inside.gives_input_gradient
    assert everywhere.gradients.of_merging > inside.gradients.of_merging == 0


def test_keys_for_later_layers_live_through_the_forward_where_no_kernel_reads_them() -> None:
    # in fp32 their repeated copies are what the kernel has
    by_precision = {
        precision: training(job_of(precision=precision, gradient_checkpointing=False))
        for precision in ("fp32", "bf16-pure")
    }
    keys_and_values = 2 * 2 * 2 * 16  # of two layers with two heads
    assert by_precision["fp32"].keys_in_forward == 32 * 4 * keys_and_values
    assert by_precision["bf16-pure"].keys_in_forward == 0
    checkpointed = training(job_of(precision="fp32", gradient_checkpointing=True))
    assert checkpointed.keys_in_forward == 0


def test_a_sparse_gate_keeps_what_its_deviation_is_of() -> None:
    def saved(share: float) -> int:
        job = job_of(
            changes={"activation_sparsity_pattern": [share] * LAYERS}, precision="bf16-pure"
        )
        points = points_of_layer(job.model.groups[0].layer, job)
        return int(evaluate(points.saved, tokens=32, span=32, r=16))

    per_token_kept = 2 * (96 + 1)  # what the gate returned, and a deviation
    assert saved(0.95) - saved(0.0) == 32 * per_token_kept


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_packed_weights_that_training_clamps_are_refused(quant: str) -> None:
    with pytest.raises(ConfigError, match=f"clamps prediction_coefs of x .* in {quant} refuse"):
        job_of(method="lora", quant=quant)
    job_of(changes={"altup_coef_clip": None}, method="lora", quant=quant)
    job_of(phase="inference", prompt_len=32, max_new_tokens=2, quant=quant)


def test_a_tied_head_leaves_the_last_projection_unquantised() -> None:
    def last(*, tied: bool) -> list[bool]:
        spec = build(SMALL | {"tie_word_embeddings": tied}, name="x")
        assert spec.streams is not None
        return [linear.quantisable for linear in spec.streams.merging]

    assert last(tied=True) == [True, True, False]
    assert last(tied=False) == [True, True, True]


@pytest.mark.parametrize("serving", ["vllm", "sglang"])
def test_engines_are_refused_for_a_stream_of_several_states(serving: str) -> None:
    with pytest.raises(ConfigError, match=f"{serving} is not predicted for x, .* has 4 states"):
        job_of(phase="inference", serving=serving)


def test_an_active_state_other_than_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="altup_active_idx is 1"):
        build(SMALL | {"altup_active_idx": 1}, name="x")


def test_the_kernels_and_bytes_around_a_stream_of_several_states_are_counted() -> None:
    job = job_of(precision="bf16-pure")
    assert work.states_bytes_around(job.model, job.dtypes) == (14 * 3 + 5 * 4 + 7) * 2 * HIDDEN
    one_state = replace(job.model, streams=None)
    assert work.states_bytes_around(one_state, job.dtypes) == 0
    assert work.outside_ops(job.model) == work.outside_ops(one_state) + 7 * work.STATE_OPS


def test_a_prompt_passes_the_projections_of_all_states() -> None:
    job = job_of(phase="inference", prompt_len=32, max_new_tokens=1)
    assert job.model.streams is not None
    projections = job.model.streams.linears
    without = replace(job.model, streams=replace(job.model.streams, expanding=(), merging=()))
    flops = [
        serving_work.inference_work(
            RunningModel(model=model, run=job.run, dtypes=job.dtypes),
            batch_size=1,
            context=32,
            decoding=False,
        ).product_flops
        for model in (job.model, without)
    ]
    assert flops[0] - flops[1] == 2 * 32 * sum(linear.num_weights for linear in projections)
