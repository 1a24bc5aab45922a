"""What names, callers and libraries hold longer than an operator needs it, term by term."""

from dataclasses import replace

import numpy as np
import pytest
from devices import A100, CPU

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory import allocator, kv_cache, layer_passes, moments
from whichlora.memory import inference as generation
from whichlora.memory import loss as logits
from whichlora.memory.activations import sequence_bias_bytes
from whichlora.memory.entries import Fact
from whichlora.memory.moments import LAYER_BACKWARD
from whichlora.memory.training import Ledger
from whichlora.memory.weights import weight_bytes
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.run import RunConfig
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.kernels import fused_qkv
from whichlora.symbolic.linear_form import per_token
from whichlora.symbolic.mlp import activate
from whichlora.symbolic.operators import OpEmitter
from whichlora.units import MiB

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
GPTJ = {"model_type": "gptj", "n_embd": 1024, "n_layer": 8, "n_head": 16, "rotary_dim": 64}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
    "parallel_attn": True,
}


def ledger_of(config: dict[str, object], **settings: object) -> Ledger:
    run = RunConfig.from_dict({"model": "m", "seq_len": 512, **settings})
    return ledger(resolve(families.build(config, name="m"), run, A100))


def model_of(config: dict[str, object], **more: object) -> ModelSpec:
    return families.build(config | more, name="m")


def part(found: Ledger, moment: str, fact: Fact) -> int:
    return sum(int(one.num_bytes) for one in found.moments[moment] if one.fact is fact)


def test_inputs_of_8_bit_matrices_live_until_the_first_layer_has_gone_backward() -> None:
    held = part(ledger_of(LLAMA, quant="int8"), "first_layer_backward", moments.HELD_INPUTS)
    # of an fp32 stream: q, k and v share theirs, so do gate and up, down; o reads 16 bit
    assert held == 8 * 512 * (4 * (1024 + 1024 + 4096) + 2 * 1024)
    assert part(ledger_of(LLAMA), "first_layer_backward", moments.HELD_INPUTS) == 0
    reentrant = ledger_of(LLAMA, quant="int8", use_reentrant=True)
    assert part(reentrant, "first_layer_backward", moments.HELD_INPUTS) == 0


def test_an_input_that_an_8_bit_matrix_holds_is_no_second_checkpoint() -> None:
    # BERT's queries read the layer's input itself, so that it is both held and checkpointed
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4}
    found = ledger_of({"model_type": "bert", **sizes}, quant="int8")
    names = [
        one.what
        for entry in found.moments["loss_backward"]
        for group in entry.groups
        if entry.fact is layer_passes.CHECKPOINTS and not group.where
        for one in group.tensors
    ]
    assert names.count("layer input") == 1


def test_sines_are_weights_without_gradients_or_no_weights_at_all() -> None:
    frozen, buffer = (
        families.build({"model_type": name, "vocab_size": 1000}, name=name)
        for name in ("pegasus", "m2m_100")
    )
    assert frozen.num_params - frozen.trainable_params == 2 * 1024 * 1024
    assert buffer.num_params == buffer.trainable_params
    job = resolve(buffer, RunConfig(model="m", phase="inference"), A100)
    assert weight_bytes(buffer, job.dtypes)["buffers"] == 2 * 2 * (1024 + 2) * 1024


def test_mpnet_has_no_checkpointing_and_a_bias_for_every_sequence() -> None:
    mpnet = {"model_type": "mpnet", "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="gradient_checkpointing: true, but the mpnet"):
        ledger_of(mpnet)
    job = resolve(model_of(mpnet), RunConfig(model="m", phase="inference"), A100)
    found = sequence_bias_bytes(job.model, job.dtypes, tokens=1024, span=512)
    assert found == 2 * 12 * 1024 * 512


def test_t5gemma_needs_stacks_of_one_width() -> None:
    narrow, wide = {"hidden_size": 512}, {"hidden_size": 1024}
    with pytest.raises(ConfigError, match="the encoder is 1024 wide and the decoder 512"):
        model_of({"model_type": "t5gemma", "encoder": wide, "decoder": narrow})


def test_each_stack_of_t5gemma_has_an_embedding_of_its_own() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}
    t5gemma = {"model_type": "t5gemma", "encoder": sizes, "decoder": sizes}
    found = ledger_of(t5gemma, method="full")
    assert "decoder_embedding_backward" in found.moments
    assert "embedding_backward" not in found.moments


def test_esm_keeps_three_factors_of_its_gelu() -> None:
    job = resolve(
        model_of({"model_type": "bert"}), RunConfig(model="m", precision="bf16-pure"), A100
    )
    tape = Tape()
    x = tape.input(per_token(100), 2, needs_grad=True)
    activate(OpEmitter(tape, job.dtypes, (), job.method), "erf_gelu", x)
    assert tape.saved == per_token(3 * 2 * 100)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dora_over_an_fp32_conv1d_makes_gradients_of_frozen_weights(precision: str) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4}
    settings = {"method": "dora", "precision": precision, "base_dtype": "float32"}
    if precision == "fp32":
        settings.pop("base_dtype")
    dropped, whole = (
        part(
            ledger_of(gpt2, **settings, lora_dropout=dropout),
            "first_layer_backward",
            moments.LATER_LAYERS_GRADIENTS,
        )
        for dropout in (0.05, 0.0)
    )
    of_layer = 4 * 256 * (3 * 256 + 256 + 2 * 4 * 256)
    assert dropped - whole == 3 * of_layer
    narrow = ledger_of(gpt2, method="dora", lora_dropout=0.05)
    assert part(narrow, "first_layer_backward", moments.LATER_LAYERS_GRADIENTS) < of_layer


def test_full_fine_tuning_gives_a_tower_no_gradients() -> None:
    text = {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    gemma = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 128}}
    gemma["vision_config"] |= {"num_attention_heads": 4, "num_hidden_layers": 2}
    spec = model_of(gemma)
    assert spec.idle_params == spec.other_params > 0
    found = ledger_of(gemma, method="full")
    gradients = part(found, "optimizer_step", moments.ALL_GRADIENTS)
    assert gradients == 2 * (spec.num_params - spec.other_params)


def test_mvp_gives_no_probabilities_back() -> None:
    inference = {"phase": "inference", "attn": "eager", "prompt_len": 256}
    sizes = {"d_model": 256, "vocab_size": 1000}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 4096, f"{side}_attention_heads": 8}
    plbart, mvp = (
        ledger_of({"model_type": name, **sizes}, **inference).moment_bytes("prefill")
        for name in ("plbart", "mvp")
    )
    assert plbart - mvp == 256 * 256 * 8 * 2  # alive while the MLP runs


def test_a_prepared_base_without_autocast_multiplies_4_bit_in_the_compute_dtype() -> None:
    settings = {"method": "qlora", "precision": "bf16-no-autocast", "attn": "sdpa"}
    wide = ledger_of(LLAMA, **settings, batch_size=1)
    all_wide = ledger_of(LLAMA, **settings | {"precision": "fp32"}, batch_size=1)
    dense = 1024 * 4096 * 2  # an expanded matrix in 16 bit rather than fp32
    assert all_wide.moment_bytes("layer_backward") - wide.moment_bytes("layer_backward") >= dense


@pytest.mark.parametrize(("attn", "pairs"), [("eager", 16), ("flash_attention_2", 0)])
def test_the_loop_of_gptj_holds_the_probabilities_of_the_block_before(
    attn: str, pairs: int
) -> None:
    model = model_of(GPTJ)
    (group,) = model.groups
    forgets = replace(group, layer=replace(group.layer, returns_probabilities=False))
    settings = {"phase": "inference", "prompt_len": 512, "precision": "bf16", "attn": attn}
    run = RunConfig.from_dict({"model": "m", **settings})
    held, less = (
        ledger(resolve(one, run, A100)).moment_bytes("prefill")
        for one in (model, replace(model, groups=(forgets,)))
    )
    assert held - less == pairs * 512 * 512 * 2


def test_a_query_and_its_gate_are_no_fused_projection() -> None:
    config = {
        "model_type": "qwen3_5_text",
        "num_attention_heads": 16,
        "num_key_value_heads": 8,  # so that query and gate are as wide as query, key and value
        "head_dim": 96,
        "hidden_size": 1536,
        "num_hidden_layers": 4,
    }
    full = model_of(config).groups[-1].layer.attentions[0]
    assert full.projection == "gated"
    assert fused_qkv(full) is None


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_falcon_keeps_keys_and_values_of_every_query_head(kv_heads: int) -> None:
    found = ledger_of(
        FALCON | {"num_kv_heads": kv_heads},
        attn="flash_attention_2",
        precision="bf16-pure",
        gradient_checkpointing=False,
    )
    saved = next(one for one in found.moments["loss_backward"] if one.fact is layer_passes.SAVED)
    repeated = [
        tensor
        for group in saved.groups
        for tensor in group.tensors
        if tensor.what in ("key, rotated", "values, repeated")
    ]
    assert [tensor.per_token for tensor in repeated] == [2 * 1024, 2 * 1024]


def test_one_key_head_is_repeated_by_a_view_under_sdpa() -> None:
    padded = {"padding": "padded", "precision": "bf16-pure", "gradient_checkpointing": False}
    few, one = (
        ledger_of(LLAMA | {"num_key_value_heads": kv_heads}, **padded).moment_bytes("loss_backward")
        for kv_heads in (2, 1)
    )
    assert few - one > 8 * 512 * 2 * 2 * 1024 * 0.9  # two copies over all heads, in every layer


def test_a_loop_that_reads_logits_holds_them_in_the_backward_of_the_head() -> None:
    settings = {"method": "full", "precision": "fp32", "loss_head": "raw"}
    found = ledger_of(LLAMA, **settings, gradient_checkpointing=False)
    assert part(found, "head_backward", logits.KEPT_LOGITS) == 512 * 32_000 * 4
    assert part(found, "head_backward", moments.LOGITS_GRADIENT) == 512 * (32_000 + 1024) * 4


def test_nemotron_normalises_in_the_dtype_of_autocast() -> None:
    config = LLAMA | {"model_type": "nemotron"}
    settings = {"method": "qlora", "gradient_checkpointing": False}
    narrow, wide = (
        ledger_of(one, **settings).moment_bytes("loss_backward") / MiB
        for one in (config, config | {"model_type": "jais2"})
    )
    assert narrow < wide - 8  # each of two norms keeps 2 bytes less, and shares its result


@pytest.mark.parametrize("model_type", ["mpt", "bloom", "t5", "codegen", "deberta-v2"])
def test_flash_attention_is_refused_where_the_class_has_none(model_type: str) -> None:
    run = RunConfig(model="m", attn="flash_attention_2", precision="bf16")
    model = model_of({"model_type": model_type})
    with pytest.raises(ConfigError, match=f"flash_attention_2 is not in the {model_type} of"):
        resolve(model, run, A100)


def test_flash_attention_is_refused_with_alibi() -> None:
    run = RunConfig(model="m", attn="flash_attention_2", precision="bf16")
    with pytest.raises(ConfigError, match="falcon"):
        resolve(model_of(FALCON, alibi=True), run, A100)
    assert resolve(model_of(FALCON), run, A100).run.attn == "flash_attention_2"


@pytest.mark.parametrize(
    ("size", "remainder"),
    [
        (MiB, 0),  # the small pool splits everything
        (3 * MiB, 3 * MiB // 20),  # its share of a MiB in 20
        (2 * MiB, 0),  # ten of them fill a segment
        (5 * MiB // 2, 0),
        (8 * MiB, 0),  # 4 MiB are left, which are split off
        (10 * MiB, 0),  # a segment of its own, which it fills
        (10 * MiB + MiB // 2, 0),  # of which more than 1 MiB is split off
        (11 * MiB + MiB // 2, MiB // 2),
    ],
)
def test_a_block_is_larger_than_asked_by_what_is_not_split_off(size: int, remainder: int) -> None:
    assert allocator.expected_remainder(size) == remainder
    sizes = np.array([size, size], dtype=np.float64)
    assert list(allocator.expected_remainder(sizes)) == [remainder, remainder]


def test_each_checkpoint_that_does_not_divide_a_segment_has_an_expected_remainder() -> None:
    settings = {"gradient_checkpointing": True, "precision": "bf16"}
    small, odd, even = (
        part(ledger_of(LLAMA, **settings, seq_len=length), "loss_backward", allocator.REMAINDERS)
        for length in (512, 768, 1024)
    )
    assert small == 0  # checkpoints of 1 MiB are cut to size
    assert odd == 8 * (3 * MiB // 2 // 20)
    assert even == 0


def test_a_factor_of_the_logits_takes_a_second_gradient_of_them() -> None:
    settings = {"loss_head": "raw", "precision": "fp32"}
    scaled, plain = (
        part(
            ledger_of(LLAMA | {"model_type": kind}, **settings),
            "loss_backward",
            logits.LOSS_BACKWARD,
        )
        for kind in ("granite", "llama")
    )
    assert scaled - plain == 512 * 32_000 * 4


def test_autocast_copies_no_experts() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    settings = {"method": "full", "precision": "fp16"}
    copied = part(ledger_of(LLAMA | experts, **settings), "loss_forward", moments.AUTOCAST_COPIES)
    attention = 2 * 1024 * 1024 + 2 * 512 * 1024
    assert copied == 8 * 2 * attention


def test_a_delta_net_that_fills_up_its_last_chunk_copies_no_operands() -> None:
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": 1024,
    }
    settings = {"precision": "fp32", "gradient_checkpointing": False}
    whole, ragged = (
        ledger_of(config, **settings, seq_len=length).moment_bytes("loss_backward")
        for length in (256, 255)
    )
    assert ragged < 0.97 * whole  # one token in 256 less would be 0.996


def test_on_a_cpu_no_block_has_a_remainder() -> None:
    run = RunConfig.from_dict({"model": "m", "seq_len": 4096})
    found = ledger(resolve(model_of(LLAMA), run, CPU))
    assert part(found, "loss_backward", allocator.REMAINDERS) == 0


def test_a_reentrant_checkpoint_holds_its_result_and_the_gradient_of_it() -> None:
    settings = {"attn": "eager", "seq_len": 2048, "precision": "bf16-no-autocast"}
    plain, reentrant = (
        part(ledger_of(LLAMA, **settings, use_reentrant=on), "layer_backward", LAYER_BACKWARD)
        for on in (False, True)
    )
    assert reentrant - plain == 2 * 2048 * 1024 * 2


def test_t5_caches_keys_and_values_in_training_until_the_loss_is_there() -> None:
    config = {"model_type": "t5", "d_model": 512, "num_heads": 8, "d_kv": 64, "num_layers": 6}
    settings = {"method": "qlora", "precision": "bf16"}
    cached = part(
        ledger_of(config, **settings, gradient_checkpointing=False),
        "loss_forward",
        kv_cache.DECODER_CACHE,
    )
    assert cached == 6 * 512 * 4 * 512 * 4  # two attentions, each with keys and values, in fp32
    assert part(ledger_of(config, **settings), "loss_forward", kv_cache.DECODER_CACHE) == 0


def test_the_last_matrix_of_an_olmo_with_a_tied_head_is_not_quantised() -> None:
    config = LLAMA | {"model_type": "olmo"}
    sizes = {
        tied: sum(
            int(one.num_bytes)
            for one in ledger_of(
                config | {"tie_word_embeddings": tied}, phase="inference", quant="int8"
            ).moments["prefill"]
            if one.what == "weights of the layers"
        )
        for tied in (True, False)
    }
    assert sizes[True] - sizes[False] == 4096 * 1024 * 2 - (4096 * 1024 + 4 * 1024)


def test_autocast_keeps_a_copy_of_the_matrix_that_is_not_quantised() -> None:
    run = {"method": "qlora", "precision": "bf16", "gradient_checkpointing": False}
    run |= {"target_modules": ("attention",), "expandable_segments": True}
    kept = {
        tied: part(
            ledger_of(LLAMA | {"model_type": "olmo", "tie_word_embeddings": tied}, **run),
            "loss_backward",
            layer_passes.SAVED,
        )
        for tied in (True, False)
    }
    assert kept[True] - kept[False] == 2 * 4096 * 1024


def test_albert_copies_a_shared_weight_once_for_autocast() -> None:
    config = {"model_type": "albert", "hidden_size": 512, "intermediate_size": 2048}
    settings = {"method": "full", "precision": "fp16", "gradient_checkpointing": False}
    settings["expandable_segments"] = True  # no remainders of blocks
    few, many = (
        ledger_of(config | {"num_hidden_layers": depth}, **settings).moment_bytes("loss_backward")
        for depth in (2, 3)
    )
    model = model_of(config)
    assert model.groups[0].shared
    per_layer = many - few
    longer, longest = (
        ledger_of(
            config | {"num_hidden_layers": depth}, **settings | {"seq_len": 256}
        ).moment_bytes("loss_backward")
        for depth in (2, 3)
    )
    # what one more layer keeps is of the tokens alone
    assert per_layer == 2 * (longest - longer)


@pytest.mark.parametrize(("quant", "narrow"), [("nf4", True), ("int8", False)])
def test_dora_takes_the_bias_of_a_4_bit_matrix_off_in_16_bit(quant: str, narrow: bool) -> None:
    config = {"model_type": "distilbert", "dim": 512, "hidden_dim": 2048, "n_layers": 4}
    config["n_heads"] = 8
    found = ledger_of(config, method="dora", quant=quant, gradient_checkpointing=False)
    saved = next(one for one in found.moments["loss_backward"] if one.fact is layer_passes.SAVED)
    operands = {
        tensor.per_token
        for group in saved.groups
        for tensor in group.tensors
        if tensor.what == "operand"
    }
    # the output projection reads 16 bit; the bias of a prepared base is fp32
    assert (2 * 512 in operands) == narrow


def test_the_first_layer_of_a_checkpointed_t5_decoder_makes_its_bias_and_zeros_again() -> None:
    config = {"model_type": "t5", "d_model": 512, "num_heads": 8, "vocab_size": 1024}
    run = {"attn": "eager", "method": "lora", "seq_len": 2048}
    zeros = 8 * 2048**2 * 2
    # a bias is as large: what the layers shared of the forward's is gone by then
    for kind, more in (("t5", 2 * zeros), ("umt5", 0)):
        moments = ledger_of(config | {"model_type": kind}, **run).moments
        first, others = (
            sum(int(one.num_bytes) for one in moments[name] if one.fact is LAYER_BACKWARD)
            for name in ("first_decoder_layer_backward", "layer_backward")
        )
        own = 4 * 512 * 2048  # the first layer's input, which others count among the checkpoints
        assert first - others == pytest.approx(more, abs=3 * own)


def test_flash_attention_of_gemma_2_makes_no_mask_where_sdpa_would_be_eager() -> None:
    config = {"model_type": "gemma2", "hidden_size": 512, "vocab_size": 1024}
    run = {"phase": "inference", "kv_cache": "static", "prompt_len": 512, "batch_size": 8}
    flash, eager = (
        part(ledger_of(config, **run, attn=attn), "prefill", generation.PROMPT_FORWARD)
        for attn in ("flash_attention_2", "eager")
    )
    mask = 2 * 8 * 512**2  # of one kind of layer, in 16 bit
    assert flash + 2 * mask < eager


def test_a_reentrant_backward_is_given_zeros_for_probabilities_that_nobody_used() -> None:
    config = {"model_type": "gptj", "n_embd": 512, "n_head": 8, "n_layer": 4, "vocab_size": 1024}
    size = {"seq_len": 1024, "precision": "bf16-pure"}
    zeros = 8 * 1024**2 * 2
    reentrant, not_so = (
        part(ledger_of(config, **size, use_reentrant=one), "layer_backward", LAYER_BACKWARD)
        for one in (True, False)
    )
    assert reentrant - not_so >= zeros


def test_bloom_holds_its_first_scores_beside_the_masked_ones() -> None:
    config = {"model_type": "bloom", "hidden_size": 512, "n_head": 8, "vocab_size": 1024}
    run = {"phase": "inference", "prompt_len": 1024, "batch_size": 4, "precision": "bf16"}
    prefill = part(ledger_of(config, **run), "prefill", generation.PROMPT_FORWARD)
    scores = 4 * 8 * 1024**2
    # the scores and the masked ones in 16 bit, in fp32 before and after softmax, and the weights
    # of the layer before
    assert prefill > (2 + 2 + 4 + 4 + 2) * scores


BIGCODE = {
    "model_type": "gpt_bigcode",
    "n_embd": 512,
    "n_head": 8,
    "n_layer": 6,
    "vocab_size": 49_280,
    "n_positions": 512,
}
OLD = {"transformers": "4.48.1"}


@pytest.mark.parametrize(
    ("precision", "head", "in_loss", "copies"),
    [
        ("bf16-pure", "hf", 2 + 2, 0),  # logits of one row, which are shifted in place; log-softmax
        # as the caller gets logits and cache: the log-softmax, and what `nll_loss` has read
        ("bf16", "hf", 2 + 4 + 2 + 4, 6 * 4 * 2 * 64),
        ("bf16-pure", "unsloth", 2, 0),
        ("bf16", "unsloth", 2 + 4, 6 * 4 * 2 * 64),
    ],
)
def test_old_gpt_bigcode_leaves_its_logits_in_16_bit(
    precision: str, head: str, in_loss: int, copies: int
) -> None:
    settings = {"method": "full", "precision": precision, "loss_head": head, "libraries": OLD}
    logits_bytes = part(ledger_of(BIGCODE, **settings), "loss_forward", logits.LOSS_FORWARD)
    assert logits_bytes == 512 * (49_280 * in_loss + copies)


def bigcode_dtypes(version: str, method: str) -> Dtypes:
    libraries = (("transformers", version),)
    run = RunConfig(
        model="m", method=method, precision="bf16", prepare_kbit=False, libraries=libraries
    )
    return resolve(model_of(BIGCODE), run, A100).dtypes


@pytest.mark.parametrize("version", ["4.48.1", "4.49.0"])
def test_gpt_bigcode_has_the_common_loss_from_4_49_on(version: str) -> None:
    dtypes = bigcode_dtypes(version, method="full")
    assert logits.has_narrow_loss(model_of(BIGCODE), dtypes) == (version == "4.48.1")


def test_old_gpt_bigcode_caches_its_fused_projections_with_checkpointing() -> None:
    def cached(method: str, version: str) -> int:
        settings = {"method": method, "precision": "bf16", "prepare_kbit": False}
        found = ledger_of(BIGCODE, **settings, libraries={"transformers": version})
        return part(found, "loss_forward", kv_cache.CHECKPOINTED_CACHE)

    assert cached("full", "4.52.4") == 6 * 512 * (512 + 2 * 64) * 2
    assert cached("qlora", "4.52.4") == 2 * cached("full", "4.52.4")  # behind an fp32 LayerNorm
    assert cached("full", "4.53.3") == 0


def test_cached_projections_in_fp32_are_not_copied() -> None:
    model = model_of(BIGCODE)
    narrow, wide = (bigcode_dtypes("4.48.1", method=method) for method in ("full", "qlora"))
    assert 4 * sum(kv_cache.widened_cache(model, narrow, checkpointed=True)) == 6 * 4 * 2 * 64
    assert kv_cache.widened_cache(model, wide, checkpointed=True) == ()
    assert kv_cache.checkpointed_cache_bytes(model, bigcode_dtypes("5.23.0", method="full")) == 0


@pytest.mark.parametrize(
    ("config", "method", "precision", "size"),
    [
        (BIGCODE, "qlora", "bf16", 4),  # LayerNorm, 4-bit MLP, sum
        (BIGCODE, "lora", "bf16", 2),  # autocast narrows what the MLP reads
        (BIGCODE, "qlora", "bf16-no-autocast", 2),
        ({"model_type": "llama", "num_hidden_layers": 2}, "qlora", "bf16", 2),
    ],
)
def test_a_4_bit_mlp_behind_a_layer_norm_makes_the_stream_fp32(
    config: dict[str, object], method: str, precision: str, size: int
) -> None:
    found = ledger_of(config, method=method, precision=precision, prepare_kbit=False)
    entry = next(one for one in found.moments["layer_forward"] if one.what == "checkpoints")
    inputs = [tensor for group in entry.groups for tensor in group.tensors]
    assert {tensor.element_bytes for tensor in inputs if "input" in tensor.what} == {size}
