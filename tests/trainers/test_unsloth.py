"""Unsloth's stack: what its functions keep, where checkpoints go, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import kernel_traces
import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.exports import FORMATS
from whichlora.memory.entries import Group
from whichlora.memory.images import TowerStep
from whichlora.memory.lasting import EXPANSION
from whichlora.memory.layer_bytes import layer_bytes
from whichlora.memory.layer_passes import (
    OFFLOADED,
    STAGING,
    offloaded_bytes,
    offloaded_passes,
    staging_bytes,
)
from whichlora.memory.loss import (
    loss_backward_bytes,
    loss_forward_bytes,
    makes_all_logits,
    unsloth_head_backward,
    unsloth_head_forward,
    unsloth_rows,
)
from whichlora.memory.weights import hosted_bytes, rotary_table_bytes
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.explain import explain
from whichlora.predict.notes import notes_on
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.numeric import added
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import adapted_linears
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing.expansion import backward_bytes, forward_bytes
from whichlora.workflow.export import make_recipe

LLAMA = "meta-llama/Meta-Llama-3-8B"
MIXTURE = "Qwen/Qwen3-30B-A3B"
RUN = RunConfig(model=LLAMA, trainer="unsloth", method="qlora", batch_size=2, seq_len=1024)
H, F, Q = 4096, 14336, 4096
PRIORS = prior_calibration(A100)


def job(run: RunConfig) -> ResolvedRun:
    return resolve(load_model(run.model), run, A100)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_layer_keeps_what_its_functions_save(method: str) -> None:
    """Each norm its input and a deviation; the projections and the MLP what a norm returned; the
    kernel queries, repeated keys and values, its result and a log-sum-exp; the MLP gate and up.
    """
    found = job(replace(RUN, method=method, gradient_checkpointing=False))
    layer, count = next(found.model.layers())
    sized: Any = {"tokens": 1, "span": 1}
    what = layer, count, found.model, found.targets, found.dtypes, found.method
    kept = layer_bytes(*what, r=16, run=found.run, **sized)
    norms = 2 * (2 * H + 4)
    attention = 2 * H + 4 * 2 * Q + 4 * 32  # keys and values for each query head
    assert int(kept.saved) == norms + attention + 2 * H + 2 * 2 * F


def test_an_untied_token_table_leaves_the_gpu_and_a_tied_one_stays() -> None:
    hosted = {"offload_embedding": "true"}
    for name, table in ((LLAMA, 128256 * H * 2), ("meta-llama/Llama-3.2-1B", 0)):
        runs = [replace(RUN, model=name, trainer_options=tuple(o.items())) for o in ({}, hosted)]
        kept, moved = (predict(load_model(name), run, A100, PRIORS).memory for run in runs)
        assert kept.breakdown["weights"] - moved.breakdown["weights"] == table
        names = frozenset({"embed_tokens"})
        assert hosted_bytes(load_model(name), job(runs[1]).dtypes, names) == table
        said = [any("offload_embedding" in note for note in notes_on(job(run))) for run in runs]
        assert said == [True, False]
        lines = explain(load_model(name), runs[1], A100, PRIORS).lines
        tables = next(line for line in lines if line.what == "embeddings and head")
        members = sum(member.num_bytes for member in tables.members) or tables.num_bytes
        assert members == tables.num_bytes


WORDS = 128_256 * H  # elements of Llama's table, and of its head
WHOLE = ("embed_tokens", "lm_head")


@pytest.mark.parametrize("asked", ["target_modules", "modules_to_save"])
def test_a_table_and_a_head_are_trained_whole_however_they_are_asked_for(asked: str) -> None:
    targets = {"target_modules": ("all-linear", *WHOLE), "modules_to_save": ("all-linear",)}
    saved = () if asked == "target_modules" else WHOLE
    found = job(replace(RUN, target_modules=targets[asked], modules_to_save=saved))
    assert found.run.modules_to_save == WHOLE
    assert not {*WHOLE} & {*found.targets}
    plain, whole = (predict(load_model(LLAMA), run, A100, PRIORS) for run in (RUN, found.run))
    parts, without = whole.memory.breakdown, plain.memory.breakdown
    # originals are a mapped file; copies are as wide as the model
    assert without["weights"] - parts["weights"] == 2 * 2 * WORDS
    assert parts["adapters"] - without["adapters"] == 2 * 2 * WORDS


def test_originals_stay_beside_the_checkpoints_of_pytorch() -> None:
    """Copies are fp32 where the model is fp16, and were so before 2024.10.7."""
    run = replace(RUN, modules_to_save=WHOLE)
    plain = (("use_gradient_checkpointing", "true"),)
    cases = (
        (replace(run, trainer_options=plain), 0, 2),
        (replace(run, gradient_checkpointing=False), 0, 2),
        (replace(run, precision="fp16"), 2, 4),
        (replace(run, libraries=(("unsloth", "2024.8"),)), 2, 4),
        (replace(run, libraries=(("unsloth", "2024.4"),)), 0, 4),
    )
    for changed, hosted, width in cases:
        found = job(changed)
        entries = ledger(found).moments["optimizer_step"]
        base = ledger(job(replace(changed, modules_to_save=()))).moments["optimizer_step"]
        sizes = {part: sum(e.num_bytes for e in entries if e.part == part) for part in PARTS_OF}
        before = {part: sum(e.num_bytes for e in base if e.part == part) for part in PARTS_OF}
        assert before["weights"] - sizes["weights"] == 2 * hosted * WORDS
        assert sizes["adapters"] - before["adapters"] == 2 * width * WORDS


PARTS_OF = ("weights", "adapters")
VISION = "meta-llama/Llama-3.2-11B-Vision-Instruct"
OF_VISION = (("torch", "2.5.1"), ("transformers", "4.46.2"), ("unsloth", "2024.11.9"))
SEEING = RunConfig(
    model=VISION,
    trainer="unsloth",
    method="qlora",
    r=16,
    target_modules=("all-linear",),
    precision="fp16",
    optimizer="adamw_8bit",
    batch_size=2,
    gradient_accumulation_steps=4,
    seq_len=256,
    images=1,
    image_size=(657, 442),
    libraries=OF_VISION,
)


def test_llama_3_2_vision_is_predicted_as_its_notebook_prints_it() -> None:
    """67,174,400 trained parameters and 10.287 GiB reserved on a T4.

    Source: unslothai/notebooks@8437a601e699 Llama_3_2_Vision_Finetuning_Unsloth_Radiography.ipynb.
    """
    card = find_gpu("t4-16gb")
    found = resolve(load_model(VISION), SEEING, card)
    assert training_step(found).num_trained == 67_174_400
    peak = predict(load_model(VISION), SEEING, card, prior_calibration(card)).memory
    assert peak.peak_reserved_bytes / 2**30 == pytest.approx(10.287, rel=0.02)


def test_a_compiled_tower_stays_narrow_and_learns_from_2025_on() -> None:
    def tower(unsloth: str, **changes: Any) -> TowerStep:
        changes = {"libraries": (*OF_VISION[:2], ("unsloth", unsloth))} | changes
        step = training_step(job(replace(SEEING, **changes)))
        assert step.model.tower is not None
        return TowerStep.of(step, step.model.tower)

    cut, learning = tower("2024.11.9"), tower("2025.1.1")
    assert (cut.goes_backward, learning.goes_backward) == (False, True)
    assert cut.forward.stream == learning.forward.stream == 2
    assert not tower("2025.1.1", freeze_vision_tower=True).goes_backward
    current = tower("2026.10.9", libraries=())
    assert current.run.gradient_checkpointing  # transformers alone leaves it as it is
    assert current.goes_backward


@pytest.mark.parametrize(
    ("unsloth", "torch", "tiles"),
    [
        ("2024.11.9", "2.5.1", "registers"),
        ("2025.10.9", "2.8.0", "registers"),
        ("2025.10.10", "2.7.0", "registers"),
        ("2025.10.10", "2.8.0", "chunks"),
        ("2026.10.9", "2.13.0", "rows"),
    ],
)
def test_the_loss_of_what_is_compiled_depends_on_torch(
    unsloth: str, torch: str, tiles: str
) -> None:
    libraries = (("torch", torch), ("transformers", "4.50.0"), ("unsloth", unsloth))
    logits = job(replace(SEEING, libraries=libraries)).dtypes.kernels.logits
    assert (logits.tiles, logits.whole) == (tiles, 0)


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({}, 2, 4),  # the gradient, and it unscaled
        ({"precision": "fp16"}, 2 + 4, 8),  # a 16-bit copy of the head beside it
        ({"libraries": (("unsloth", "2026.7.1"),)}, 4, 4),  # the sum, and that of a chunk
        ({"trainer_options": (("return_logits", True),)}, 0, 2),
        ({"libraries": (("unsloth", "2024.8"),)}, 2, 4 + 2 + 2),
    ],
    ids=str,
)
def test_a_trained_head_has_its_gradient_in_the_loss(
    settings: dict[str, Any], forward: int, backward: int
) -> None:
    changed = replace(RUN, **settings)
    trained, frozen = (
        training_step(job(replace(changed, modules_to_save=saved))) for saved in (("lm_head",), ())
    )
    assert unsloth_head_forward(trained.model, trained.dtypes) == forward * WORDS
    assert unsloth_head_backward(trained.model, trained.dtypes) == backward * WORDS
    assert trained.loss.forward_bytes - frozen.loss.forward_bytes == forward * WORDS
    assert trained.loss.backward_bytes - frozen.loss.backward_bytes == backward * WORDS


def test_the_rate_of_embeddings_narrows_their_states() -> None:
    """8-bit states of a table have 32 bits; Unsloth's own optimizer asks for none."""
    run = replace(RUN, modules_to_save=("embed_tokens",), optimizer="adamw_8bit")
    rated = replace(run, trainer_options=(("embedding_learning_rate", 5e-6),))
    wide, narrow = (predict(load_model(LLAMA), each, A100, PRIORS) for each in (run, rated))
    kept = (each.memory.breakdown["optimizer_states"] for each in (wide, narrow))
    assert next(kept) - next(kept) == 2 * (4 - 1) * WORDS - 2 * 4 * WORDS // 256


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "meta-llama/Llama-3.2-1B"}, "ties the copies of .*use trainer sft"),
        ({"libraries": (("unsloth", "2025.3.1"),)}, "trains lm_head is not predicted; give return"),
        ({"model": "Qwen/Qwen3-30B-A3B"}, "none of them for qwen3_moe"),
    ],
)
def test_what_nobody_has_looked_at_is_refused_of_whole_modules(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        job(replace(RUN, **({"modules_to_save": ("lm_head",)} | settings)))


def test_dropped_inputs_leave_a_byte_each() -> None:
    found = job(replace(RUN, gradient_checkpointing=False))
    dropping = job(replace(RUN, gradient_checkpointing=False, lora_dropout=0.1))
    sized: Any = {"tokens": 1, "span": 1}
    kept = []
    for one in (found, dropping):
        layer, count = next(one.model.layers())
        what = layer, count, one.model, one.targets, one.dtypes, one.method
        kept.append(int(layer_bytes(*what, r=16, run=one.run, **sized).saved))
    assert kept[1] - kept[0] == 6 * H + F  # q, k, v, o, gate, up; down


def test_inputs_of_all_layers_but_the_last_go_to_the_host() -> None:
    model = load_model(LLAMA)
    assert offloaded_bytes(model, tokens=2048) == 31 * 2 * H * 2048
    assert offloaded_bytes(model, tokens=256) == 0  # 2 MiB each: kept
    assert offloaded_bytes(model, tokens=257) > 0
    assert "496.0 MiB of layers' inputs lie in pinned host memory" in notes_on(job(RUN))


def test_the_device_has_two_checkpoints_and_two_buffers() -> None:
    def checkpoints(run: RunConfig) -> int:
        entries = ledger(job(run)).moments["loss_forward"]
        return int(added(entry.num_bytes for entry in entries if entry.part == "activations"))

    on_device = replace(RUN, trainer_options=(("use_gradient_checkpointing", "true"),))
    stream = 2 * H * 2048
    assert checkpoints(on_device) - checkpoints(RUN) == (32 - 2 - 2) * stream
    facts = [entry.fact for entry in ledger(job(RUN)).moments["loss_forward"]]
    assert OFFLOADED in facts


def test_inputs_above_2_mib_leave_two_buffers_and_the_first_and_last_one() -> None:
    """Of h 4096 in 16 bit, 256 tokens are 2 MiB: those stay, and need no buffer."""
    found = job(RUN)
    assert staging_bytes(found.model, tokens=257, buffers=2) == 2 * (2 * H * 257)
    assert staging_bytes(found.model, tokens=256, buffers=2) == 0
    for tokens, held in ((257, 2), (256, 32)):
        step = training_step(found, batch_size=1, seq_len=tokens)
        masks = Group(tensors=(), **step.sized)
        passes = offloaded_passes(found.model, step.layers, masks=masks, sized=step.sized)
        assert sum(group.num_bytes for group in passes.groups) == held * 2 * H * tokens


def test_a_quantised_matrix_has_room_to_be_expanded() -> None:
    entries = ledger(job(RUN)).moments["layer_forward"]
    assert [e.num_bytes for e in entries if e.fact is EXPANSION] == [2 * H * F]
    plain = ledger(job(replace(RUN, method="lora"))).moments["layer_forward"]
    assert not [entry for entry in plain if entry.fact is EXPANSION]


def test_the_loss_makes_logits_of_a_few_hundred_tokens() -> None:
    """8,192 states of 4,096 are 261 rows of the vocabulary; 606 rows are a whole product."""
    found = job(RUN)
    assert unsloth_rows(found.model, tokens=8192) == 512
    assert unsloth_rows(found.model, tokens=2**16) == 2048
    assert unsloth_rows(found.model, tokens=2**24) == 4096
    assert unsloth_rows(found.model, tokens=100) == 100
    what = found.model, found.dtypes, found.trainer
    size = loss_forward_bytes(*what, tokens=8192, loss_head="unsloth-fused")
    assert size == 8192 * (4 * H + 12) + 512 * 4 * 128_256


def at(release: str, **settings: Any) -> ResolvedRun:
    return job(replace(RUN, libraries=(("unsloth", release),), **settings))


@pytest.mark.parametrize(
    ("release", "tokens", "per_token", "rows"),
    [
        # logits in 16 bit and accelerate's fp32 copy, the last norm's input, two vectors
        ("2024.1", 4096, 6 * 128_256 + 2 * H, 0),
        ("2024.11.7", 4096, 6 * 128_256 + 2 * H, 0),
        ("2024.11.8", 512, 4 * H, 0),
        ("2024.12.5", 1024, 6 * 128_256 + 2 * H, 0),
        ("2024.12.5", 1025, 4 * H, 0),
        # 2 GiB of fp32 logits are one chunk, more are four
        ("2025.8.5", 4096, 4 * H, 4096),
        ("2025.8.5", 4200, 4 * H, 1050),
        # 8 GiB of them are one chunk, then 4
        ("2025.10.10", 16_384, 4 * H, 16_384),
        ("2025.10.10", 17_000, 4 * H, 4_250),
        ("2026.7.1", 8_192, 4 * H, 8_192),
        ("2026.7.1", 8_400, 4 * H, 2_100),
        ("2026.10.9", 512, 4 * H, 512),
    ],
)
def test_what_the_loss_makes_of_logits_by_release(
    release: str, tokens: int, per_token: int, rows: int
) -> None:
    found = at(release)
    what = found.model, found.dtypes, found.trainer
    size = loss_forward_bytes(*what, tokens=tokens, loss_head="unsloth-fused")
    assert size == tokens * (per_token + 12) + rows * 128_256 * 4
    is_whole = per_token > 128_256
    assert makes_all_logits(found.dtypes, "unsloth-fused", tokens) == is_whole
    backward = loss_backward_bytes(*what, tokens=tokens, loss_head="unsloth-fused")
    of_head = 2 * H * 128_256 * (release in ("2024.11.8", "2024.12.5"))
    assert backward == tokens * (4 * H + 2 * 128_256 * is_whole) + of_head


@pytest.mark.parametrize(
    ("model", "release", "positions"),
    [
        ("mistralai/Mistral-7B-v0.3", "2024.5", 32_768),
        ("Qwen/Qwen2-7B", "2024.6", 131_072),
        ("Qwen/Qwen2-7B", "2024.7", 32_768),
        ("Qwen/Qwen2-7B", "2025.2.1", 0),
        (LLAMA, "2024.8", 8_192),
    ],
)
def test_each_attention_had_rotary_tables(model: str, release: str, positions: int) -> None:
    found = at(release, model=model)
    tables = rotary_table_bytes(found.model, found.dtypes)
    assert tables == 2 * 2 * positions * 128 * found.model.num_hidden_layers


def test_where_checkpoints_go_by_release() -> None:
    def staged(release: str) -> float:
        entries = ledger(at(release)).moments["loss_forward"]
        return sum(e.num_bytes for e in entries if e.fact is STAGING) / (2 * H * 2048)

    assert not at("2024.3").trainer.offloads(at("2024.3").run)
    assert at("2024.4").trainer.offloads(at("2024.4").run)
    releases = ("2024.4", "2025.3.1", "2025.3.2", "2026.4.9", "2026.5.1")
    assert [staged(each) for each in releases] == [0, 0, 1, 1, 2]


def test_what_adapters_add_was_a_tensor_of_its_own() -> None:
    """In the backward of the MLP: a fourth of its width beside the other three."""
    entries = ledger(at("2025.1.5")).moments["layer_forward"]
    assert not [entry for entry in entries if entry.fact is EXPANSION]
    peaks = []
    for release in ("2025.3.0", "2025.3.1"):
        found = at(release)
        layer, count = next(found.model.layers())
        what = layer, count, found.model, found.targets, found.dtypes, found.method
        sized: Any = {"tokens": 2**20, "span": 1024}
        peaks.append(layer_bytes(*what, r=16, run=found.run, **sized).backward / 2**20)
    assert peaks[0] - peaks[1] == pytest.approx(2 * F, rel=0.01)


@pytest.mark.parametrize(
    ("release", "shorter", "longer", "tolerance"),
    [("2024.11.6", 7_385, 48_447, 0.003), ("2024.12.4", 12_106, 89_389, 0.12)],
)
def test_a_token_takes_what_the_published_contexts_say(
    release: str, shorter: int, longer: int, tolerance: float
) -> None:
    """The longest of Llama 3.3 70B in 48 and 80 GB, rank 32: 837 and 445 KB for each token.

    Source: unsloth.ai/blog/llama3-3, before and with cut cross entropy.
    """
    settings: Any = {"model": "meta-llama/Llama-3.3-70B-Instruct", "batch_size": 1, "r": 32}
    settings |= {"attn": "sdpa", "optimizer": "adamw_8bit"}
    peaks = [
        ledger(at(release, seq_len=tokens, **settings)).peak_allocated_bytes
        for tokens in (shorter, longer)
    ]
    published_slope = 32 * 2**30 / (longer - shorter)
    slope = (peaks[1] - peaks[0]) / (longer - shorter)
    assert slope == pytest.approx(published_slope, rel=tolerance)


def test_adapters_are_wide_and_nobody_copies_them() -> None:
    dtypes = job(replace(RUN, method="lora")).dtypes
    assert dtypes.adapter_bytes == 4
    assert not dtypes.autocast
    assert job(RUN).run.use_reentrant is True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "google/gemma-2-2b"}, "it compiles gemma2, or runs other code for it"),
        ({"model": "openai/gpt-oss-20b", "method": "lora"}, "it compiles gpt_oss"),
        ({"model": MIXTURE, "quantize_moe_experts": True}, "with false: it always does, got true"),
        (
            {"model": MIXTURE, "libraries": (("unsloth", "2025.9"),)},
            "unsloth=2025.9 runs the experts of qwen3_moe by other code, .* give 2026.5 or later",
        ),
        ({"method": "dora"}, "method: trainer unsloth is predicted with lora or qlora, got dora"),
        ({"method": "full"}, "got full"),
        ({"quant": "int8"}, "quant: .* none or nf4-dq, got int8"),
        ({"precision": "bf16-pure"}, "precision: .* with bf16, got bf16-pure"),
        ({"attn": "eager"}, "attn: .* with sdpa"),
        ({"loss_head": "liger"}, "loss_head: liger is not in trainer unsloth"),
        (
            {"trainer_options": (("use_gradient_checkpointing", "no"),)},
            "'no' is not accepted; accepted are unsloth, true",
        ),
    ],
)
def test_what_is_not_predicted_is_refused(settings: dict[str, Any], message: str) -> None:
    run = replace(RUN, **settings)
    with pytest.raises(ConfigError, match=message):
        predict(load_model(run.model), run, A100, PRIORS)


def test_each_expert_has_an_adapter_of_the_asked_rank_and_the_router_none() -> None:
    """48 layers of hidden 2,048: q 4,096, k and v 512, 128 experts of width 768."""
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    experts = 128 * ((2048 + 2 * 768) + (768 + 2048))
    for targets, each_layer in (("all-linear", attention + experts), ("attention", attention)):
        found = job(replace(RUN, model=MIXTURE, target_modules=(targets,)))
        trained = sum(
            count * found.method.adapter_params(linear, 16)
            for linear, count in adapted_linears(found.model, found.targets)
        )
        assert trained == 16 * 48 * each_layer


def test_products_of_experts_keep_rows_and_factors_and_no_weight() -> None:
    """Of 8 rows per token: what the adapters of both products read, and their small products."""
    kept = []
    for targets in (("all-linear",), ("attention",)):
        run = replace(RUN, model=MIXTURE, target_modules=targets, gradient_checkpointing=False)
        found = job(run)
        layer, count = next(found.model.layers())
        what = layer, count, found.model, found.targets, found.dtypes, found.method
        one, two = (
            int(layer_bytes(*what, r=16, run=run, tokens=tokens, span=1).saved) for tokens in (1, 2)
        )
        kept += [two - one, 2 * one - two]
    full, factors, plain, no_factors = kept
    rows = 8
    assert full - plain == 2 * rows * (2048 + 2 * 16)  # what `down` reads is kept in any case
    assert factors - no_factors == 2 * 128 * 16 * (2048 + 2 * 768 + 768 + 2048)


def test_a_layer_s_experts_are_expanded_for_one_product_at_a_time() -> None:
    """LoRA in 16 bit expands nothing: of QLoRA's peak, more than half is the larger weight."""
    peaks = []
    for name in ("qlora", "lora"):
        run = replace(RUN, model=MIXTURE, method=name)
        found = job(run)
        layer, count = next(found.model.layers())
        what = layer, count, found.model, found.targets, found.dtypes, found.method
        peaks.append(int(layer_bytes(*what, r=16, run=run, tokens=1024, span=1024).backward))
    gate_and_up = 2 * 128 * 2 * 768 * 2048
    assert 0.5 * gate_and_up < peaks[0] - peaks[1] <= gate_and_up


def test_a_base_in_16_bit_keeps_its_experts_so() -> None:
    assert job(replace(RUN, model=MIXTURE)).dtypes.quantises_experts
    assert not job(replace(RUN, model=MIXTURE, method="lora")).dtypes.quantises_experts


def test_experts_are_expanded_again_in_the_backward() -> None:
    """Axolotl keeps what a repeated forward expanded."""
    runs = (
        replace(RUN, model=MIXTURE),
        RunConfig(model=MIXTURE, method="qlora", quantize_moe_experts=True),
    )
    for run, again in zip(runs, (True, False), strict=True):
        found = job(run)
        layer, _ = next(found.model.layers())
        expanded, _ = forward_bytes(layer, found.dtypes, 1024)
        assert (backward_bytes(layer, found.dtypes)[0] > 0.9 * expanded) == again


def test_it_needs_triton() -> None:
    old = find_gpu("p40-24gb")
    with pytest.raises(ConfigError, match=r"does not run on p40|do not run on p40"):
        resolve(load_model(LLAMA), replace(RUN, precision="fp16"), old)


@pytest.mark.parametrize(
    ("kind", "runs", "worst"),
    [("liger", 60, 0.002), ("unsloth", 40, 0.002), ("unsloth-experts", 24, 0.002)],
)
def test_the_ledger_has_the_bytes_of_the_kept_traces(kind: str, runs: int, worst: float) -> None:
    errors = kernel_traces.errors(kind)
    assert len(errors) == runs
    assert median(errors) < worst / 4
    assert max(errors) < worst


def test_its_script_says_where_checkpoints_go() -> None:
    def script(run: RunConfig) -> str:
        made = FORMATS["unsloth"](make_recipe(run, A100.key))
        assert made.run == make_recipe(run, A100.key).run
        return made.files["train_unsloth.py"].replace("'", '"')

    on_device = replace(RUN, trainer_options=(("use_gradient_checkpointing", "true"),))
    assert 'use_gradient_checkpointing="unsloth"' in script(RUN)
    assert "use_gradient_checkpointing=True" in script(on_device)
