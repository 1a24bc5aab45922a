"""Single formulas of memory, each against a number that the library's rule gives by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory import activations, kv_cache, moments, quantised_cache, weights
from whichlora.memory import inference as generation
from whichlora.memory import loss as logits
from whichlora.memory.entries import Fact
from whichlora.memory.layer_bytes import LayerBytes, layer_bytes
from whichlora.memory.worst_layer import has_one_order, leaves_behind_keys, worst_backward
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model

LLAMA_3_8B = "meta-llama/Llama-3.1-8B"
LLAMA_VOCABULARY = 128_256 * 4096
PURE: dict[str, Any] = {"precision": "bf16-pure", "expandable_segments": True}


def job(run: RunConfig, gpu: GpuSpec = A100) -> ResolvedRun:
    spec: ModelSpec | None = find_model(run.model)
    assert spec is not None
    return resolve(spec, run, gpu)


def held(run: RunConfig, moment: str, fact: Fact) -> int:
    entries = ledger(job(run)).moments[moment]
    return sum(int(entry.num_bytes) for entry in entries if entry.fact is fact)


# --- weights


@pytest.mark.parametrize(
    ("blocks", "second_level"),
    [(256, 1), (257, 2), (512, 2)],  # 256 scales share one in fp32
)
def test_scales_that_are_quantised_share_one_of_256(blocks: int, second_level: int) -> None:
    size = weights.quantised_bytes(64 * blocks, "nf4-dq", out_features=64)
    assert size == 32 * blocks + blocks + 4 * second_level + 2560


def test_only_a_last_matrix_without_norm_after_it_stays_as_it_is() -> None:
    """OLMo's norms have no weight, so transformers leaves the last layer's projection alone."""
    olmo = job(RunConfig(model="allenai/OLMo-1B-hf", method="qlora"))
    projection = 8192 * 2048
    quantised = projection // 2 + 4 * projection // 64 + 2560
    if olmo.dtypes.quant == "nf4-dq":
        quantised = projection // 2 + projection // 64 + 4 * (projection // 64 // 256) + 2560
    in_fp32 = replace(olmo.dtypes, base_bytes=4)
    assert weights.unconverted_bytes(olmo.model, in_fp32) == 4 * projection - quantised
    assert weights.unconverted_copy_bytes(olmo.model, in_fp32) == 2 * projection
    llama = job(RunConfig(model=LLAMA_3_8B, method="qlora"))
    assert weights.unconverted_bytes(llama.model, llama.dtypes) == 0
    assert weights.unconverted_copy_bytes(llama.model, llama.dtypes) == 0


def test_a_bias_counts_once_where_its_matrix_is_left_as_it_is() -> None:
    olmo = job(RunConfig(model="allenai/OLMo-1B-hf", method="qlora"))
    (group,) = olmo.model.groups
    mlp = group.layer.mlp
    assert mlp is not None
    *others, last = mlp.linears
    biased = replace(mlp, linears=(*others, replace(last, bias=True)))
    spec = replace(olmo.model, groups=(replace(group, layer=replace(group.layer, mlp=biased)),))
    # of the matrix only: a bias is never quantised
    assert weights.unconverted_bytes(spec, olmo.dtypes) == weights.unconverted_bytes(
        olmo.model, olmo.dtypes
    )


def test_blocks_of_8_bit_floats_share_a_scale() -> None:
    size = weights.quantised_bytes(7168 * 2048, "fp8", out_features=2048, scale_block=128)
    assert size == 7168 * 2048 + 16 * 56 * 4
    assert weights.quantised_bytes(7168 * 2048, "fp8", out_features=2048) == 7168 * 2048 + 2048 * 4
    ragged = weights.quantised_bytes(200 * 576, "fp8", out_features=576, scale_block=128)
    assert ragged == 200 * 576 + 5 * 2 * 4


def test_a_scale_of_gptq_serves_128_weights_unless_it_is_told_otherwise() -> None:
    size = weights.quantised_bytes(128 * 1000, "gptq-int4", out_features=1000)
    assert size == 128 * 1000 // 2 + 1000 * 2 + 1000 // 2  # codes, scales in 16 bit, zeros in 4


# --- masks and biases, of 2 sequences of 10 tokens in 16 bit

PAIRS = 2 * 10 * 10


@pytest.mark.parametrize(
    ("name", "attn", "padding", "checkpointed", "kept"),
    [
        # a mask of 4 bytes, and the distances as int64, the same for both sequences
        ("microsoft/deberta-v3-base", "sdpa", "none", True, 4 * PAIRS + 8 * 100),
        ("microsoft/deberta-v3-base", "sdpa", "none", False, 8 * 100),
        # ALiBi is added to the mask, for each of 32 heads
        ("tiiuae/falcon-rw-1b", "sdpa", "none", True, 2 * 32 * PAIRS),
        ("tiiuae/falcon-rw-1b", "sdpa", "none", False, 0),
        # biases of 8 heads for encoder and decoder, and zeros for the cross attention
        ("google-t5/t5-small", "sdpa", "none", True, 3 * 2 * 8 * 100),
        ("google-t5/t5-small", "sdpa", "none", False, 2 * 8 * 100),
        # boolean masks of the encoder, for itself and for the decoder that reads it
        ("google-t5/t5-small", "sdpa", "padded", True, 3 * 2 * 8 * 100 + 2 * PAIRS),
        # eager masks have the stream's width, and the decoder has its causal one
        ("google-t5/t5-small", "eager", "none", True, 3 * 2 * 8 * 100 + 2 * PAIRS),
        ("google-t5/t5-small", "eager", "padded", True, 3 * 2 * 8 * 100 + 3 * 2 * PAIRS),
        # layers with a window have a mask of their own
        ("google/gemma-3-1b-pt", "eager", "none", True, 2 * 2 * PAIRS),
        ("google/gemma-3-1b-pt", "sdpa", "padded", True, 2 * PAIRS),
        ("google-bert/bert-base-uncased", "eager", "none", True, 0),
        ("google-bert/bert-base-uncased", "eager", "padded", True, 2 * PAIRS),
    ],
)
def test_layers_share_masks_and_biases(
    name: str, attn: Any, padding: Any, checkpointed: bool, kept: int
) -> None:
    found = job(RunConfig(model=name, attn=attn, padding=padding, precision="bf16-pure"))
    assert kept == activations.kept_mask_bytes(
        found.model, found.dtypes, tokens=20, span=10, checkpointed=checkpointed
    )


def led(**config: Any) -> ResolvedRun:
    whole = {"model_type": "led", "d_model": 64, "attention_window": 8, **config}
    run = RunConfig(model="led", precision="bf16-pure", seq_len=10)
    return resolve(families.build(whole, name="led"), run, A100)


@pytest.mark.parametrize(("side", "kept"), [("encoder", 2 * 32 * 16), ("decoder", 2 * PAIRS)])
def test_an_encoder_in_windows_has_a_mask_of_all_pairs_of_padded_tokens(
    side: str, kept: int
) -> None:
    found = led()
    sizes = {"tokens": 20, "span": 10}
    assert kept == activations.kept_mask_bytes(found.model, found.dtypes, side=side, **sizes)
    first = found.model.groups[0].layer
    making = activations.making_mask_bytes(first, found.dtypes, **sizes)
    assert making == (3 * 2 + 1) * 32 * 16
    plain = found.model.groups[-1].layer
    assert activations.making_mask_bytes(plain, found.dtypes, **sizes) == 0


@pytest.mark.parametrize("window", [7, 0, [8, 12], [8, 8.5], "8"])
def test_windows_that_do_not_fit_each_other_are_refused(window: Any) -> None:
    with pytest.raises(ConfigError, match="attention_window"):
        led(encoder_layers=2, attention_window=window)


# --- logits


@pytest.mark.parametrize(
    ("transformers", "per_entry", "of_head"),
    [
        (
            "4.44.0",
            4 + 2,
            0,
        ),  # fp32 logits, which are held, get an fp32 gradient, and one of 16 bit
        ("5.23.0", 2, 2 * 4096),
    ],
)
def test_old_models_return_fp32_logits_to_a_loop_with_its_own_loss(
    transformers: str, per_entry: int, of_head: int
) -> None:
    run = RunConfig(
        model=LLAMA_3_8B,
        loss_head="raw",
        precision="bf16-pure",
        libraries=(("transformers", transformers),),
    )
    found = job(run)
    size = logits.loss_backward_bytes(
        found.model, found.dtypes, found.trainer, tokens=10, loss_head="raw"
    )
    assert size == 10 * (128_256 * per_entry + of_head)


def test_a_softcap_adds_its_tanh_and_a_gradient_to_the_backward() -> None:
    found = job(RunConfig(model="google/gemma-2-2b", loss_head="raw", precision="bf16-pure"))
    plain = replace(found.model, logit_softcap=None)
    capped, uncapped = (
        logits.loss_backward_bytes(spec, found.dtypes, found.trainer, tokens=10, loss_head="raw")
        for spec in (found.model, plain)
    )
    assert capped - uncapped == 10 * 256_000 * (2 + 2)


# --- eager attention on a GPU


@pytest.mark.parametrize("precision", ["bf16-no-autocast", "fp16-no-autocast", "fp32"])
def test_an_eager_softmax_on_a_gpu_multiplies_its_result_and_gradient_first(precision: Any) -> None:
    run = RunConfig(model=LLAMA_3_8B, attn="eager", precision=precision, seq_len=4096)
    found = job(run)
    seen = replace(found.dtypes, kernel_buffers=False)
    with_product, without = (
        int(ledger(replace(found, dtypes=dtypes)).moment_bytes("layer_backward"))
        for dtypes in (found.dtypes, seen)
    )
    assert found.dtypes.kernel_buffers
    assert with_product - without == 32 * 4096**2 * 4


def test_fp16_scores_are_widened_inside_the_softmax_and_bf16_ones_before_it() -> None:
    fp16, bf16 = (
        job(RunConfig(model=LLAMA_3_8B, attn="eager", precision=precision, seq_len=4096))
        for precision in ("fp16-no-autocast", "bf16-no-autocast")
    )
    sizes = [int(ledger(found).moment_bytes("layer_backward")) for found in (fp16, bf16)]
    assert sizes[1] - sizes[0] == 32 * 4096**2 * 2  # the gradient of the copy, not of the scores


# --- caches


@pytest.mark.parametrize(
    ("kv_cache_name", "kept"),
    [("dynamic", 17), ("static", 17), ("quantized", 17), ("paged", 256), ("vllm", 32)],
)
def test_a_cache_keeps_17_tokens_in_whole_blocks(kv_cache_name: str, kept: int) -> None:
    layer = job(RunConfig(model=LLAMA_3_8B)).model.groups[0].layer
    assert kv_cache.kept_tokens(layer, 17, kv_cache=kv_cache_name) == kept


# --- moments of training


def test_a_layer_goes_backward_under_what_earlier_ones_keep_and_later_ones_left() -> None:
    """Gemma 3 1B: of 26 layers, the sixth, twelfth, 18th and 24th see all tokens."""
    run = RunConfig(model="google/gemma-3-1b-pt")
    found = job(run)
    layers = [
        replace(
            layer_bytes(
                layer,
                count,
                found.model,
                found.targets,
                found.dtypes,
                found.method,
                r=8,
                tokens=10,
                span=10,
                run=found.run,
            ),
            gathered=1,
        )
        for layer, count in found.model.layers()
    ]

    def worst(sliding: int, full: int, kept: tuple[int, int], left: tuple[int, int]) -> int:
        return int(worst_backward(found.model, layers, [sliding, full], kept, left))

    # after the 24th come two sliding layers, which have given back what they kept
    assert worst(0, 1000, (30, 70), (0, 0)) == 1000 - 2 * 30
    # and left their gradients: after the 18th these are seven, with one of the other kind
    assert worst(0, 1000, (0, 0), (5, 11)) == 1000 + 7 * 5 + 11
    # the last layer of all goes backward before anybody has gathered anything
    assert worst(1000, 0, (30, 70), (0, 0)) == 1000 - 1


GEMMA_4 = {  # the second half borrows the keys of the first
    "model_type": "gemma4_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "head_dim": 64,
    "global_head_dim": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
}


def gemma_4_layers(**settings: Any) -> tuple[ResolvedRun, list[LayerBytes]]:
    run = RunConfig(model="x", batch_size=1, seq_len=10, **settings)
    found = resolve(families.build(GEMMA_4, name="x"), run, A100)
    model, method, sizes = found.model, found.method, {"r": 16, "tokens": 10, "span": 10}
    return found, [
        layer_bytes(
            layer, count, model, found.targets, found.dtypes, method, run=found.run, **sizes
        )
        for layer, count in model.layers()
    ]


def test_gradients_of_shared_keys_wait_for_the_layers_that_made_them() -> None:
    found, layers = gemma_4_layers()
    assert [group.positions for group in found.model.groups] == [(0,), (1,), (2,), (3,)]
    first = 10 * 2 * (4 * 64 + 4 * 64)  # keys and values of the first layer, in 16 bit
    nothing, size = [0] * 4, 10**6
    for place, waiting in ((0, 0), (1, first), (2, 0)):
        backward = [size * (number == place) for number in range(4)]
        worst = worst_backward(found.model, layers, backward, nothing, nothing)
        assert worst == size + waiting


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_keys_made_again_hold_their_graph_until_the_first_layer_is_done(
    use_reentrant: bool,
) -> None:
    found, layers = gemma_4_layers(use_reentrant=use_reentrant)
    _, full, *borrowing = layers
    # what the norms of keys and values have read, in fp32
    normed = 10 * 4 * (4 * 512 + 4 * 512)
    assert (full.graph_behind_held > normed) is not use_reentrant
    assert all(layer.graph_behind_held == layer.held_by_later_layers == 0 for layer in borrowing)
    keys = sum(layer.held_by_later_layers for layer in layers)
    entries = ledger(found).moments["first_layer_backward"]
    held = [int(entry.num_bytes) for entry in entries if entry.fact is moments.SHARED_KEYS]
    # the leaf of that graph, whose gradient the first layer has got, and nobody else holds
    leaf = 10 * 64 * full.stream_bytes * use_reentrant
    assert full.leaf_behind_held == leaf
    assert leaves_behind_keys(found.model, layers, 0) == leaf
    assert leaves_behind_keys(found.model, [layers[1]] * 4, 0) == (3 + 2) * leaf
    assert held == [keys + full.graph_behind_held + leaf]


def test_a_static_cache_keeps_a_window_of_the_keys_that_later_layers_read_whole() -> None:
    spec = families.build(GEMMA_4 | {"sliding_window": 32}, name="x")

    def handed_on(tokens: int) -> int:
        return int(kv_cache.handed_on_bytes(spec, batch_size=3, tokens=tokens, element_bytes=2))

    assert handed_on(32) == 0
    assert handed_on(33) == 3 * 33 * 2 * (4 * 64 + 4 * 64)  # of the first layer alone


def test_a_checkpoint_whose_graph_shared_keys_hold_in_fp32_keeps_its_input() -> None:
    def behind(precision: str) -> int:
        _, layers = gemma_4_layers(use_reentrant=False, precision=precision)
        return int(layers[1].graph_behind_held)

    # a norm in 16 bit has read a copy, whose place the input takes
    in_fp32 = behind("fp32")
    assert in_fp32 > behind("bf16-pure")
    assert in_fp32 >= 10 * 4 * (64 + 4 * 512 + 4 * 512)


def test_sdpa_holds_repeated_keys_while_the_kernel_reads_their_copies() -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 512,
    }
    run = RunConfig(model="x", method="qlora", padding="padded", batch_size=4, seq_len=512)
    padded = ledger(resolve(families.build(config, name="x"), run, A100))
    width = 8 * 512
    # in fp32 queries, keys and values, and both once per head; in 16 bit what the kernel has
    in_fp32, in_16_bit = 4 * (width + width // 2 * 2 + 2 * width), 2 * 4 * width
    assert padded.moment_bytes("layer_forward") > 4 * 512 * (in_fp32 + in_16_bit)


@pytest.mark.parametrize(
    ("modules", "vocabularies"),
    [(("lm_head",), 1), (("embed_tokens",), 0), (("embed_tokens", "lm_head"), 1)],
)
def test_the_gradient_of_a_saved_embedding_is_the_last_to_come(
    modules: tuple[str, ...], vocabularies: int
) -> None:
    plain, saved = (
        held(
            RunConfig(model=LLAMA_3_8B, modules_to_save=names, **PURE),
            "first_layer_backward",
            moments.LATER_LAYERS_GRADIENTS,
        )
        for names in ((), modules)
    )
    assert saved - plain == vocabularies * 2 * LLAMA_VOCABULARY


@pytest.mark.parametrize(
    ("name", "is_known"), [("google/gemma-3-1b-pt", True), ("google-t5/t5-small", False)]
)
def test_the_order_of_layers_is_known_within_one_stack(name: str, is_known: bool) -> None:
    assert has_one_order(job(RunConfig(model=name)).model) is is_known


@pytest.mark.parametrize(
    ("run", "copied"),
    [
        (RunConfig(model=LLAMA_3_8B, method="qlora"), 2 * LLAMA_VOCABULARY),  # prepared: in fp32
        (RunConfig(model=LLAMA_3_8B, method="lora"), 0),
        (RunConfig(model="google-bert/bert-base-uncased", method="qlora"), 2 * 30_522 * 768),
    ],
    ids=lambda value: getattr(value, "model", str(value)),
)
def test_autocast_copies_a_head_that_was_widened(run: RunConfig, copied: int) -> None:
    found = job(run)
    assert logits.head_copy_bytes(found.model, found.dtypes, loss_head="hf") == copied


# --- moments of inference


@pytest.mark.parametrize(("new_tokens", "positions"), [(1, 0), (2, 2 * 100)])
def test_the_prompts_scores_are_held_until_there_is_a_second_token(
    new_tokens: int, positions: int
) -> None:
    run = RunConfig(
        model=LLAMA_3_8B,
        phase="inference",
        batch_size=2,
        prompt_len=100,
        max_new_tokens=new_tokens,
        libraries=(("transformers", "4.41.0"),),
    )
    assert held(run, "second_token", generation.HELD_LOGITS) == 4 * positions * 128_256
    dropped = replace(run, libraries=(("transformers", "4.44.0"),))  # `del outputs`
    assert held(dropped, "second_token", generation.HELD_LOGITS) == 0


@pytest.mark.parametrize(
    ("model", "transformers", "layers", "width", "prompt", "grown"),
    [
        # a fused product of queries, keys and values; GPT-NeoX has keys in fp32 besides
        ("EleutherAI/pythia-410m", "4.42.4", 24, 1024, 10, 6),
        ("openai-community/gpt2-large", "4.44.2", 36, 1280, 6, 4),
        ("facebook/opt-1.3b", "4.46.3", 24, 2048, 4, 4),  # three products
        ("EleutherAI/pythia-410m", "4.46.3", 24, 1024, 8, 0),  # a cache, whose values are views
        ("facebook/opt-1.3b", "4.49.0", 24, 2048, 4, 0),
    ],
)
def test_older_classes_keep_a_tuple_of_views_beside_the_next_one(
    model: str, transformers: str, layers: int, width: int, prompt: int, grown: int
) -> None:
    """Bytes per token and channel: of what the prompt leaves, and of what the next pass makes.

    Source: live tensors of `generate` with transformers 4.42.4 on a CPU, by operator.
    """
    run = RunConfig(
        model=model,
        phase="inference",
        batch_size=2,
        prompt_len=100,
        max_new_tokens=2,
        libraries=(("transformers", transformers),),
    )
    per_byte = 200 * layers * width
    assert held(run, "prefill", generation.PROMPT_CACHE) == prompt * per_byte
    if grown:
        caches = held(run, "second_token", generation.TWO_CACHES)
        assert caches == (prompt + grown) * per_byte
    else:
        assert "second_token" not in ledger(job(run)).moments


@pytest.mark.parametrize(
    ("model", "transformers", "size"),
    [
        ("EleutherAI/pythia-410m", "4.42.4", 24 * (2048 * 2048 + 2 * 4 * 2048 * 16)),
        ("EleutherAI/pythia-410m", "4.48.3", 24 * 2048 * 2048),
        ("EleutherAI/pythia-410m", "4.49.0", 0),
        ("openai-community/gpt2-large", "5.1.0", 36 * 1024 * 1024),
        ("openai-community/gpt2-large", "5.2.0", 0),
    ],
)
def test_attentions_of_older_releases_have_a_boolean_mask_each(
    model: str, transformers: str, size: int
) -> None:
    run = RunConfig(model=model, phase="inference", libraries=(("transformers", transformers),))
    found = job(run)
    assert weights.weight_bytes(found.model, found.dtypes)["buffers"] == size


def test_segments_that_grow_leave_a_small_encoder_no_debt() -> None:
    run = RunConfig(
        model="google-bert/bert-base-uncased", phase="inference", prompt_len=8, precision="fp16"
    )
    plain, joined = (
        int(ledger(job(replace(run, expandable_segments=on))).idle_bytes) for on in (False, True)
    )
    assert 0 <= joined <= plain


@pytest.mark.parametrize(("steps", "fresh"), [(1, 1), (3, 3), (131, 3)])
def test_a_quantised_cache_joins_what_is_new_to_a_second_copy_of_the_values(
    steps: int, fresh: int
) -> None:
    run = RunConfig(
        model=LLAMA_3_8B,
        phase="inference",
        kv_cache="quantized",
        prompt_len=1000,
        max_new_tokens=steps + 1,
    )
    keys = 8 * 128 * 2  # bytes per token of one layer, in 16 bit
    quantised = 1000 + steps - fresh
    # keys and values expanded, then joined with the new tokens; the values' new ones once more
    joined = 2 * keys * (2 * quantised + fresh) + keys * (fresh - 1)
    assert held(run, "decode", quantised_cache.EXPANDED) == joined


# --- classes of older releases


def test_caches_of_views_keep_the_joint_projection_they_are_cut_from() -> None:
    older, today = (_generation("openai-community/gpt2", each) for each in ("4.44.0", "5.23.0"))
    queries = 12 * 768 * 2  # the third that is neither keys nor values, in 16 bit
    assert kv_cache.viewed_bytes(older.model, older.dtypes) == queries
    assert kv_cache.viewed_bytes(today.model, today.dtypes) == 0
    masks = 12 * 1024 * 1024  # one of booleans in each layer
    assert weights.older_buffer_bytes(older.model, older.dtypes) == masks
    assert weights.older_buffer_bytes(today.model, today.dtypes) == 0


def test_fp32_tables_of_gpt_neox_once_made_its_cached_keys_fp32() -> None:
    older, today = (_generation("EleutherAI/pythia-410m", each) for each in ("4.42.0", "5.23.0"))
    assert kv_cache.wide_key_elements(older.model, older.dtypes) == 24 * 1024
    assert kv_cache.widened_keys_bytes(older.model, older.dtypes) == 24 * 1024 * (4 - 2)
    assert kv_cache.widened_keys_bytes(today.model, today.dtypes) == 0
    # its values alone are views of the joint projection
    assert kv_cache.viewed_bytes(older.model, older.dtypes) == 24 * 2 * 1024 * 2
    assert logits.prompt_logit_bytes(older.model, older.dtypes) == 2
    assert logits.prompt_logit_bytes(today.model, today.dtypes) == 4


def _generation(model: str, transformers: str) -> ResolvedRun:
    libraries = (("transformers", transformers),)
    run = RunConfig(model=model, phase="inference", quant="none", libraries=libraries)
    return job(replace(run, precision="fp16"))
