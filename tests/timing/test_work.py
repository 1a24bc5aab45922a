"""What one step does, counted: against PyTorch's own counter, and by how it grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whichlora import families
from whichlora.memory.weights import CODE_TABLE_BYTES
from whichlora.methods import weight_dtype
from whichlora.predict.quantities import num_trained, running_model, update_of
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Layer
from whichlora.spec.run import Precision, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.symbolic.kernels import Kernel
from whichlora.symbolic.layer import layer_traffic
from whichlora.timing import serving_work, training_work, work
from whichlora.timing.cache_work import expanding
from whichlora.timing.chip import UNKNOWN_CHIP, Chip
from whichlora.timing.running import RunningModel
from whichlora.timing.work import Work

LLAMA = "HuggingFaceTB/SmolLM2-135M"
MIXTURE = "allenai/OLMoE-1B-7B-0924"
RUN = RunConfig(model=LLAMA, seq_len=128, batch_size=2, precision="fp32")

TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 320,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 6,
        "n_head": 4,
        "vocab_size": 320,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "deepseek_v32": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_n_heads": 6,
        "index_head_dim": 16,
        "index_topk": 8,
        "vocab_size": 320,
    },
    "nanochat": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 320,
    },
    "granitemoehybrid": {
        "hidden_size": 64,
        "shared_intermediate_size": 160,
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_state": 24,
        "mamba_chunk_size": 20,
        "vocab_size": 320,
        "tie_word_embeddings": True,
    },
}


# a frozen weight that the code multiplies itself is a batched product, as attention's are
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 1,
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "mamba_d_state": 8,
    "vocab_size": 320,
}

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
_STACKS = {"vocab_size": 320, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3}
_STACKS |= {f"{side}_ffn_dim": 160 for side in ("encoder", "decoder")}
_STACKS |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
_SMALL_IDS = {"pad_token_id": 0, "decoder_start_token_id": 0}
_GEMMA = _TEXT | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16}
# Encoders fill masked words, encoder-decoders read and write as many tokens.
TINY_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _TEXT,
    "electra": _TEXT | {"embedding_size": 32},
    "megatron-bert": _TEXT,
    "rembert": _TEXT | {"input_embedding_size": 32, "output_embedding_size": 96},
    "gte": _TEXT,
    "eurobert": _TEXT | {"pad_token_id": 0},
    "esm": _TEXT | {"pad_token_id": 0, "position_embedding_type": "rotary"},
    "m2m_100": _STACKS | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "pegasus": _STACKS,
    "marian": _STACKS | _SMALL_IDS,
    "mvp": _STACKS,
    "t5gemma": {"vocab_size": 320, "encoder": _GEMMA, "decoder": _GEMMA},
}


def job_of(run: RunConfig, config: dict[str, Any] | None = None) -> ResolvedRun:
    model = families.build(config, name="tiny") if config else load_model(run.model)
    return resolve(model, run, find_gpu("h100-sxm-80gb"))


def training(job: ResolvedRun, **shape: Any) -> Work:
    run = job.run
    model, seq_len = job.at_length(shape.pop("seq_len", run.seq_len))
    sizes = {"batch_size": run.batch_size, "seq_len": seq_len, "r": run.r} | shape
    update = replace(update_of(job, sizes["r"]), num_micro_batches=run.gradient_accumulation_steps)
    running = RunningModel(
        model=model,
        run=run,
        dtypes=job.dtypes,
        method=job.method,
        targets=job.targets,
        r=sizes.pop("r"),
        chip=sizes.pop("chip", UNKNOWN_CHIP),
    )
    return training_work.training_work(running, update=update, **sizes)


def inference_work(
    model: ModelSpec, run: RunConfig, dtypes: Dtypes, *, chip: Chip = UNKNOWN_CHIP, **sizes: Any
) -> Work:
    """Without adapters."""
    running = RunningModel(model=model, run=run, dtypes=dtypes, chip=chip)
    return serving_work.inference_work(running, **sizes)


def counts(done: Work) -> dict[str, Any]:
    return {field.name: getattr(done, field.name) for field in fields(done)}


# --- against the real libraries


def counted(config: dict[str, Any], job: ResolvedRun) -> tuple[int, int]:
    """FLOPs of one forward and backward: matrix products, and attention."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from torch.utils.flop_counter import FlopCounterMode

    run = job.run
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    auto, task = {
        "causal-lm": ("AutoModelForCausalLM", "CAUSAL_LM"),
        "seq2seq-lm": ("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
        "encoder": ("AutoModelForMaskedLM", None),
    }[job.model.task]
    model = getattr(transformers, auto).from_config(
        transformers.AutoConfig.for_model(config["model_type"], **arguments),
        attn_implementation="eager",  # the fused CPU kernel is not counted
    )
    if job.method.peft_class:
        config_of_peft = peft.LoraConfig(task_type=task, **job.method.peft_config(run))
        model = peft.get_peft_model(model, config_of_peft)
    model.train()
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    ids = torch.randint(320, (run.batch_size, run.seq_len))
    labels = ids[:, :1].expand(-1, run.target_len) if run.target_len else ids
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=labels.clone()).loss.backward()
    flops: Counter[str] = Counter()
    for operation, number in counter.get_flop_counts()["Global"].items():
        if "convolution" in str(operation):
            continue  # of the weights' gradient it counts every pair of channels
        flops["attention" if "bmm" in str(operation) else "products"] += number
    return flops["products"], flops["attention"]


def test_tensors_that_layers_share_are_mixed_once_and_not_for_every_token() -> None:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}

    def flops(experts: int) -> int:
        run = tiny_run("lily", gradient_checkpointing=False)
        run = replace(run, method_options=(("num_B", experts),))
        return int(training(job_of(run, {"model_type": "llama"} | config | heads)).product_flops)

    # of two B more, as torch's counter has it: mixed forward and twice backward, and the router's
    outputs = 64 + 32 + 32 + 64 + 128 + 128 + 64
    router = 3 * 48 * 6 * 2 * 8 * 7
    assert flops(4) - flops(2) == 2 * (6 * 2 * 8 * outputs + router)


def tiny_run(method: str, *, gradient_checkpointing: bool) -> RunConfig:
    return RunConfig(
        model="tiny",
        method=method,
        batch_size=3,
        seq_len=48,
        r=8,
        precision="fp32",
        attn="eager",
        gradient_checkpointing=gradient_checkpointing,
    )


@pytest.mark.sampled(24)
@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TINY)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize(
    # Frozen embeddings spare the first layer's input gradients, checkpointing need not repeat a
    # layer's last product, and DoRA's magnitude counts as if it were a factor (1 % of models this
    # narrow): all of it is small, except for that last product in full fine-tuning.
    ("method", "tolerance"),
    [("full", 0.09), ("lora", 0.04), ("dora", 0.052)],
)
def test_flops_are_those_that_pytorch_counts(
    model_type: str, gradient_checkpointing: bool, method: str, tolerance: float
) -> None:
    config = TINY[model_type] | {"model_type": model_type}
    job = job_of(tiny_run(method, gradient_checkpointing=gradient_checkpointing), config)
    products, attention = counted(config, job)
    done = training(job)
    assert done.attention_flops == pytest.approx(attention, rel=1e-12)
    assert done.product_flops == pytest.approx(products, rel=tolerance)
    if method == "full" and not gradient_checkpointing:
        assert done.product_flops == products


@pytest.mark.oracle
@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ("embed_tokens", "lm_head")},
        {"target_modules": ("q_proj", "v_proj", "embed_tokens", "lm_head")},
    ],
    ids=str,
)
def test_flops_around_the_layers_are_those_that_pytorch_counts(settings: dict[str, Any]) -> None:
    """A table is looked up, a copied head has one product more, and no checkpoint has them."""
    config = TINY["llama"] | {"model_type": "llama", "vocab_size": 4000}
    plain = tiny_run("lora", gradient_checkpointing=True)
    plain = replace(plain, target_modules=("q_proj", "v_proj"))
    without, beside = (job_of(replace(plain, **changed), config) for changed in ({}, settings))
    predicted = training(beside).product_flops - training(without).product_flops
    assert predicted == counted(config, beside)[0] - counted(config, without)[0]


@pytest.mark.oracle
@pytest.mark.parametrize(("method", "tolerance"), [("full", 1e-12), ("lora", 0.04)])
def test_flops_of_a_loop_over_tokens_are_in_sum_those_that_pytorch_counts(
    method: str, tolerance: float
) -> None:
    job = job_of(tiny_run(method, gradient_checkpointing=False), JAMBA)
    done = training(job)
    total = sum(counted(JAMBA, job))
    assert done.attention_flops + done.product_flops == pytest.approx(total, rel=tolerance)


@pytest.mark.sampled(16)
@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TINY_ENCODERS)
@pytest.mark.parametrize(("method", "tolerance"), [("full", 0), ("lora", 0.05)])
def test_flops_of_encoders_and_of_two_stacks_are_those_that_pytorch_counts(
    model_type: str, method: str, tolerance: float
) -> None:
    config = TINY_ENCODERS[model_type] | {"model_type": model_type}
    job = job_of(tiny_run(method, gradient_checkpointing=False), config)
    products, attention = counted(config, job)
    done = training(job)
    assert done.attention_flops == attention
    assert done.product_flops == pytest.approx(products, rel=tolerance)


@pytest.mark.oracle
@pytest.mark.parametrize(("method", "tolerance"), [("full", 0), ("lora", 0.05)])
def test_flops_of_windows_are_in_sum_those_that_pytorch_counts(
    method: str, tolerance: float
) -> None:
    # 48 tokens are padded to 64; frozen weights multiply transposed rows batch by batch
    config = _STACKS | {"model_type": "led", "attention_window": [32, 16, 32]}
    job = job_of(tiny_run(method, gradient_checkpointing=False), config)
    done = training(job)
    total = sum(counted(config, job))
    assert done.attention_flops + done.product_flops == pytest.approx(total, rel=tolerance)


_TINY_T5 = {"vocab_size": 320, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 160} | _SMALL_IDS
TWO_LENGTHS = {name: TINY_ENCODERS[name] for name in ("m2m_100", "mvp", "t5gemma")}
TWO_LENGTHS |= {name: _TINY_T5 | {"num_layers": 3} for name in ("t5", "umt5")}


@pytest.mark.sampled(8)
@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TWO_LENGTHS)
@pytest.mark.parametrize("target_len", [16, 80])
@pytest.mark.parametrize(("method", "tolerance"), [("full", 0), ("lora", 0.05)])
def test_flops_of_two_lengths_are_those_that_pytorch_counts(
    model_type: str, target_len: int, method: str, tolerance: float
) -> None:
    config = TWO_LENGTHS[model_type] | {"model_type": model_type}
    run = replace(tiny_run(method, gradient_checkpointing=False), target_len=target_len)
    job = job_of(run, config)
    products, attention = counted(config, job)
    done = training(job)
    assert done.attention_flops == attention
    assert done.product_flops == pytest.approx(products, rel=tolerance)


def test_a_decoder_reads_the_prompt_once_and_its_encoder_never_again() -> None:
    config = TINY_ENCODERS["m2m_100"] | {"model_type": "m2m_100"}
    job = job_of(RunConfig(model="tiny", phase="inference", precision="fp32"), config)
    sizes = {"batch_size": 1, "context": 100}
    prompt, token = (
        inference_work(job.model, job.run, job.dtypes, decoding=decoding, **sizes).product_flops
        for decoding in (False, True)
    )
    square, wide, head = 64 * 64, 2 * 64 * 160, 320 * 64
    in_encoder, once = 3 * (4 * square + wide), 3 * (6 * square + wide)
    assert prompt == 2 * (100 * (in_encoder + 3 * 2 * square) + once + head)
    assert token == 2 * (once + head)


def moved_per_pair_and_head(job: ResolvedRun) -> tuple[float, float]:
    """Bytes that a forward and a backward move for each query, key and head."""
    (layer, _), *_ = job.model.layers()
    found = layer_traffic(
        layer, job.model.stream_width, (), job.dtypes, job.method, masked=False, reentrant=False,
        checkpointed=False, stream=job.dtypes.stream_bytes,
    )  # fmt: skip
    heads = layer.attentions[0].num_attention_heads
    return found.forward.moved.per_pair / heads, found.backward.moved.per_pair / heads


@pytest.mark.oracle
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_score_matrices_move_the_bytes_that_pytorch_moves(precision: Precision) -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    batch, heads, seq_len = 2, 3, 16
    pairs = batch * heads * seq_len**2

    class Counter(TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if not (function.is_view or "view" in function.__name__):
                for one in tree_leaves((args, kwargs or {}, out)):
                    if isinstance(one, torch.Tensor) and one.numel() == pairs:
                        self.moved += one.element_size()
            return out

    job = job_of(replace(RUN, method="full", attn="eager", precision=precision))
    dtype = getattr(torch, weight_dtype(job.run))
    shape = (batch, heads, seq_len, 8)  # no other tensor has as many elements as there are pairs
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.zeros(batch, 1, seq_len, seq_len, dtype=dtype)
    module = SimpleNamespace(num_key_value_groups=1, training=True)
    with Counter() as forward:
        out, _ = llama.eager_attention_forward(module, q, k, v, mask, scaling=0.3, dropout=0.0)
    gradient = torch.ones_like(out)
    with Counter() as backward:
        out.backward(gradient)
    moved = moved_per_pair_and_head(job)
    size = dtype.itemsize
    # the time model counts products by their arithmetic: one writes scores, one reads probabilities
    assert (
        moved[0]
        == forward.moved
        - 2 * size
        + size / job.model.groups[0].layer.attentions[0].num_attention_heads
    )
    # CUDA's softmax writes the product of gradient and result before it sums that up
    assert moved[1] - 8 == backward.moved - 4 * size


def test_only_attention_that_writes_its_scores_moves_them() -> None:
    def growth(run: RunConfig) -> float:
        """Bytes of four times the tokens over four times the bytes."""
        short, long = (inference(run, context=context, decoding=False) for context in (512, 2048))
        trained = [training(job_of(run), seq_len=seq_len) for seq_len in (512, 2048)]
        forward = long.elementwise_bytes / (4 * short.elementwise_bytes)
        step = trained[1].elementwise_bytes / (4 * trained[0].elementwise_bytes)
        assert (forward > 1.05) == (step > 1.05)
        return float(forward)

    assert growth(replace(RUN, attn="sdpa", precision="bf16")) == pytest.approx(1, abs=0.01)
    assert growth(replace(RUN, attn="sdpa-efficient")) == pytest.approx(1, abs=0.01)
    assert growth(replace(RUN, attn="eager")) > 1.5
    assert growth(replace(RUN, attn="sdpa")) > 1.5  # grouped keys in fp32: the math kernel


# --- by how it grows


@settings(max_examples=50)
@given(
    method=st.sampled_from(["full", "lora", "qlora", "dora", "qdora"]),
    shape=st.fixed_dictionaries(
        {"batch_size": st.integers(1, 64), "seq_len": st.integers(1, 4096), "r": st.integers(1, 64)}
    ),
    dimension=st.sampled_from(["batch_size", "seq_len", "r"]),
    more=st.integers(1, 100),
)
def test_more_of_a_dimension_is_never_less_work(
    method: str, shape: dict[str, int], dimension: str, more: int
) -> None:
    job = job_of(replace(RUN, method=method))
    less = counts(training(job, **shape))
    grown = counts(training(job, **(shape | {dimension: shape[dimension] + more})))
    assert all(grown[name] >= less[name] >= 0 for name in less)


def test_accumulation_repeats_everything_but_the_update() -> None:
    once, twice = (
        training(job_of(replace(RUN, gradient_accumulation_steps=steps))) for steps in (1, 2)
    )
    assert twice.product_flops == 2 * once.product_flops
    assert twice.elementwise_bytes == 2 * once.elementwise_bytes
    sums = 3 * 4 * num_trained(job_of(RUN))  # read both, write their sum
    assert twice.optimizer_bytes - once.optimizer_bytes == sums
    num_adapters = 30 * 7 * 2
    assert once.launches < twice.launches < 2 * once.launches + num_adapters


def test_checkpointing_adds_a_forward_and_saves_no_work() -> None:
    kept, repeated = (
        training(job_of(replace(RUN, method="full", gradient_checkpointing=on)))
        for on in (False, True)
    )
    layers = sum(count * work.active_weights(layer) for layer, count in load_model(LLAMA).layers())
    tokens = RUN.batch_size * RUN.seq_len
    assert repeated.product_flops - kept.product_flops == 2 * tokens * layers
    assert repeated.launches > kept.launches


def test_full_finetuning_costs_three_forwards_and_lora_about_two() -> None:
    run = replace(RUN, gradient_checkpointing=False)
    full = training(job_of(replace(run, method="full"))).product_flops
    lora = training(job_of(replace(run, method="lora", r=1))).product_flops
    assert lora == pytest.approx(full * 2 / 3, rel=0.02)


def test_only_a_quantised_base_is_dequantised() -> None:
    assert training(job_of(RUN)).dequant_bytes == 0
    assert training(job_of(replace(RUN, method="qlora"))).dequant_bytes > 0


def test_dora_moves_its_weights_whatever_the_number_of_tokens() -> None:
    lora, dora = (job_of(replace(RUN, method=name)) for name in ("lora", "dora"))
    few, many = (
        training(dora, seq_len=length).elementwise_bytes
        - training(lora, seq_len=length).elementwise_bytes
        for length in (1, 2)
    )
    weights = 2 * few - many  # of no token at all
    # the forward and its repetition: 32 bytes of each weight in fp32, and 12 of an identity
    adapted = sum(
        count * linear.num_weights
        for layer, count in dora.model.layers()
        for linear in layer.linears
    )
    assert 2 * 32 * adapted < weights < 2 * 44 * adapted


def test_dora_on_few_bits_expands_each_weight_once_more_per_forward() -> None:
    qlora, qdora = (job_of(replace(RUN, method=name)) for name in ("qlora", "qdora"))
    once = training(qlora).dequant_bytes / 3  # forward twice, backward once
    weights = sum(
        count * linear.num_weights
        for layer, count in qlora.model.layers()
        for linear in layer.linears
    )
    more = training(qdora).dequant_bytes - training(qlora).dequant_bytes
    assert more == pytest.approx(2 * (once + 4 * weights))  # and the norm reads it in fp32


def test_dropout_makes_dora_repeat_the_base_product() -> None:
    plain, dropped = (
        training(job_of(replace(RUN, method="dora", lora_dropout=p))).product_flops
        for p in (0.0, 0.1)
    )
    lora = training(job_of(replace(RUN, method="lora"))).product_flops
    assert dropped - plain > lora / 2


@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_one_array_of_shapes_gives_what_each_shape_gives(method: str) -> None:
    import numpy as np

    job = job_of(replace(RUN, method=method))
    batch_sizes, seq_lens = np.array([1, 2, 7]), np.array([64, 100, 2048])
    together = counts(training(job, batch_size=batch_sizes, seq_len=seq_lens))
    for i, (batch_size, seq_len) in enumerate(zip(batch_sizes, seq_lens, strict=True)):
        alone = counts(training(job, batch_size=int(batch_size), seq_len=int(seq_len)))
        for name, value in alone.items():
            counted = together[name]
            assert float(counted[i] if np.ndim(counted) else counted) == pytest.approx(float(value))


def inference(run: RunConfig, *, context: int, decoding: bool) -> Work:
    job = job_of(replace(run, phase="inference"))
    return inference_work(
        job.model,
        job.run,
        job.dtypes,
        batch_size=run.batch_size,
        context=context,
        decoding=decoding,
    )


def test_a_decoding_step_reads_every_weight_for_one_token() -> None:
    prompt = inference(RUN, context=128, decoding=False)
    step = inference(RUN, context=128, decoding=True)
    assert step.weight_read_bytes == prompt.weight_read_bytes
    assert step.product_flops < prompt.product_flops / 32


def test_a_longer_context_makes_decoding_read_more_cache() -> None:
    short = inference(RUN, context=100, decoding=True)
    long = inference(RUN, context=200, decoding=True)
    assert long.attention_bytes == 2 * short.attention_bytes
    assert long.product_flops == short.product_flops


def test_a_small_batch_leaves_most_experts_unread() -> None:
    run = RunConfig(model=MIXTURE, batch_size=1)
    one = inference(run, context=64, decoding=True)
    many = inference(replace(run, batch_size=1000), context=64, decoding=True)
    assert one.weight_read_bytes < many.weight_read_bytes / 3


def test_old_vllm_launches_kernels_beyond_its_captured_graphs() -> None:
    def launches(context: int, **vllm: str) -> int:
        run = RunConfig(
            model=LLAMA, phase="inference", kv_cache="vllm", libraries=tuple(vllm.items())
        )
        job = resolve(load_model(LLAMA), run, find_gpu("a100-sxm-80gb"))
        counted = inference_work(
            job.model, job.run, job.dtypes, batch_size=1, context=context, decoding=True
        )
        return int(counted.launches)

    longest = serving_work.VLLM_CAPTURED_TOKENS
    assert launches(longest, vllm="0.4.2") == launches(longest + 1) == 1
    for first_engine in ("0.4.2", "0.6.2", "0.6.4", "0.7.3"):
        assert launches(longest + 1, vllm=first_engine) > serving_work.VLLM_LAYER_OPS * 30
    for other in ("0.6.3", "0.8.0"):  # 0.6.3 compares another length
        assert launches(longest + 1, vllm=other) == 1


def test_layers_that_borrow_keys_read_the_last_position_of_a_prompt_alone() -> None:
    config = {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": 320,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    spec = families.build(config, name="m")
    flops = {}
    for attn in ("sdpa", "flash_attention_2"):
        run = RunConfig(model="m", phase="inference", attn=attn, batch_size=2, prompt_len=64)
        dtypes = resolve(spec, run, find_gpu("a100-sxm-80gb")).dtypes
        counted = inference_work(spec, run, dtypes, batch_size=2, context=64, decoding=False)
        flops[attn] = counted.product_flops
    borrowed = sum(
        group.count * work.active_weights(group.layer)
        for group in spec.groups
        if group.layer.attentions[0].projection == "borrowed"
    )
    assert flops["flash_attention_2"] - flops["sdpa"] == 2 * borrowed * (2 * 64 - 2)


@pytest.mark.parametrize(
    ("name", "kernel", "halved"),
    [
        ("Qwen/Qwen2.5-0.5B", "flash", True),  # the kernel skips what the mask hides
        ("Qwen/Qwen2.5-0.5B", "eager", False),
        ("Qwen/Qwen2.5-0.5B", "math", False),
        ("google-bert/bert-base-uncased", "flash", False),  # every token sees every other
    ],
)
def test_only_a_causal_kernel_spares_half_of_the_scores(
    name: str, kernel: Kernel, halved: bool
) -> None:
    layer = next(iter(load_model(name).layers()))[0]
    (attention,) = layer.attentions
    per_key = attention.num_attention_heads * (attention.head_dim + attention.v_head_dim)
    counted = work.attention_flops_per_token(attention, 1000, kernel, triangular=True)
    assert counted == 1000 * per_key * (1 if halved else 2)
    counted = work.attention_flops_per_token(attention, 1000, kernel, triangular=False)
    assert counted == 2000 * per_key


def test_a_decoder_reads_all_of_the_encoder_s_output() -> None:
    layers = [layer for layer, _ in load_model("google-t5/t5-small").layers()]
    decoder = next(layer for layer in layers if len(layer.attentions) == 2)
    itself, cross = decoder.attentions
    assert cross.cross
    per_key = itself.num_attention_heads * (itself.head_dim + itself.v_head_dim)
    counted = [
        work.attention_flops_per_token(attention, 10, "efficient", triangular=True)
        for attention in decoder.attentions
    ]
    assert counted == [10 * per_key, 10 * per_key * 2]


def test_a_decoding_step_reads_the_states_of_a_recurrent_layer() -> None:
    job = job_of(RunConfig(model="Qwen/Qwen3.5-9B", phase="inference"))

    def moved(model: ModelSpec) -> float:
        return float(
            inference_work(
                model, job.run, job.dtypes, batch_size=2, context=100, decoding=True
            ).elementwise_bytes
        )

    def stateless(layer: Layer) -> Layer:
        bare = [replace(one, recurrent_elements=0) for one in layer.attentions]
        return replace(layer, attentions=tuple(bare))

    groups = [replace(group, layer=stateless(group.layer)) for group in job.model.groups]
    # 24 layers of 32 heads, whose states are 128 by 128 in fp32, read or written 12 times
    states = 24 * 32 * 128 * 128 * 4
    without = replace(job.model, groups=tuple(groups))
    assert moved(job.model) - moved(without) == 2 * 12 * states


def test_a_gated_delta_rule_launches_kernels_for_each_chunk_of_a_prompt() -> None:
    job = job_of(RunConfig(model="Qwen/Qwen3.5-9B", phase="inference"))
    sizes = {"batch_size": 1, "decoding": False}
    short, long = (
        inference_work(job.model, job.run, job.dtypes, context=context, **sizes).launches
        for context in (512, 1024)
    )
    assert long - short == 24 * 8 * work.CHUNK_OPS


def test_a_loop_over_tokens_launches_kernels_for_each_and_fills_gradients_of_all() -> None:
    job = job_of(RunConfig(model="tiny", gradient_checkpointing=False), JAMBA)
    short, long, longer = (training(job, batch_size=1, seq_len=length) for length in (64, 96, 128))
    assert long.launches - short.launches == 4 * 32 * 4  # in four of six layers
    assert long.autograd_launches - short.autograd_launches == 4 * 32 * 17
    linear = long.elementwise_bytes - short.elementwise_bytes
    assert longer.elementwise_bytes - long.elementwise_bytes - linear == (
        4 * 2 * 32 * 32 * 2 * 4 * 4 * 128 * 8  # zeros and sums, of two tensors, in fp32
    )


# --- by hand: TINY["llama"] has 43,008 weights in each of 6 layers and 320 words of width 64

TINY_LLAMA = TINY["llama"] | {"model_type": "llama"}
LAYER_WEIGHTS = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
# nested nf4: codes, 8-bit scales with their own, what is written, scales in fp32, and code tables
LAYER_EXPANDED = LAYER_WEIGHTS * (0.5 + 1 / 64 + 4 / 2**14 + 2 + 16 / 64) + 7 * CODE_TABLE_BYTES
HEAD_WEIGHTS = 320 * 64
LAYER_KERNELS = 38 + 2  # traced: forward of a Llama layer; keys and values appended to a cache
# Bytes per token in 16 bit: two norms that widen (6), square (8), take the mean (4), scale (8),
# narrow (6) and multiply (4), with three numbers of a row (24 in all); two residuals; rotary
# embedding of queries and keys, and the four tables that it reads; activation and product of the
# MLP.
LAYER_MOVES = 2 * (64 * 36 + 24) + 2 * 3 * 2 * 64 + 10 * 2 * 96 + 4 * 2 * 16 + 5 * 2 * 160
NORM_WEIGHTS = 2 * 2 * 64  # bytes that a forward of a layer reads beside them


def tiny_job(config: dict[str, Any] = TINY_LLAMA, **keys: Any) -> ResolvedRun:
    usual = {"model": "tiny", "precision": "bf16-pure", "gradient_checkpointing": False}
    return job_of(RunConfig(**usual | keys), config)


def test_a_full_step_of_a_tiny_llama_by_hand() -> None:
    tokens = 3 * 48
    counted = training(tiny_job(method="full"), batch_size=3, seq_len=48)
    weights = 6 * LAYER_WEIGHTS + HEAD_WEIGHTS
    assert counted.product_flops == 6 * tokens * weights  # one product forward and two backward
    assert counted.weight_read_bytes == 3 * 2 * weights
    # 4 heads of 16 twice, each sees half of 48 keys; backward is two and a half forwards
    assert counted.attention_flops == 6 * tokens * 48 * 4 * 32 * 3.5
    assert counted.attention_bytes == counted.dequant_bytes == counted.engine_steps == 0
    # parameter read and written, gradient read, two states read and written: in 16 bit; clipping
    # reads the gradients, then reads and writes them
    norms = (2 * 6 + 1) * 64
    assert counted.optimizer_bytes == (7 + 3) * 2 * (weights + norms)


def test_a_step_of_lora_on_a_tiny_llama_by_hand() -> None:
    tokens = 3 * 48
    job = tiny_job(method="lora", r=8)
    counted = training(job, batch_size=3, seq_len=48)
    trained = 6 * 8 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 160) * 3)
    frozen = 6 * LAYER_WEIGHTS + HEAD_WEIGHTS
    # frozen weights: forward and the input's gradient; factors: their own gradient as well
    assert counted.product_flops == tokens * (4 * frozen + 6 * trained)
    assert counted.weight_read_bytes == 2 * 2 * frozen
    repeated = tiny_job(method="lora", r=8, gradient_checkpointing=True)
    again = training(repeated, batch_size=3, seq_len=48)
    assert again.product_flops - counted.product_flops == 2 * tokens * (6 * LAYER_WEIGHTS + trained)
    assert again.attention_flops / counted.attention_flops == pytest.approx(4.5 / 3.5)
    assert again.weight_read_bytes - counted.weight_read_bytes == 2 * 6 * LAYER_WEIGHTS


@pytest.mark.parametrize(
    ("settings", "splits"),
    [
        ({}, True),
        ({"libraries": (("torch", "2.1.2"),)}, False),
        ({"libraries": (("torch", "2.1.2"),), "attn": "flash_attention_2"}, True),
        ({"libraries": (("torch", "2.1.2"),), "attn": "eager"}, True),
        ({"attn": "sdpa-efficient"}, False),
    ],
)
def test_a_kernel_that_splits_no_keys_reads_the_cache_at_few_multiprocessors(
    settings: dict[str, Any], splits: bool
) -> None:
    job = tiny_job(phase="inference", kv_cache="static", **settings)

    def passes(batch_size: int) -> float:
        shape = {"batch_size": batch_size, "context": 1000, "decoding": True}
        known = inference_work(
            job.model, job.run, job.dtypes, **shape, chip=Chip(num_multiprocessors=108)
        )
        keys_and_values = batch_size * 6 * 1000 * 2 * 2 * 16 * 2
        return known.attention_bytes / keys_and_values

    # 4 heads of a sequence keep 4 of 108 multiprocessors busy; two read the same keys
    waited = 0.0 if splits else serving_work.HEAD_PASS * (2 * 108 / 4 - 1)
    assert passes(1) - passes(100) == pytest.approx(waited)
    assert passes(54) == passes(100)


def test_products_are_in_fp32_where_no_autocast_narrows_them() -> None:
    def step(**keys: Any) -> Work:
        return training(tiny_job(batch_size=3, seq_len=48, r=8, **keys))

    narrow = step(method="lora", precision="bf16")
    assert narrow.wide_product_flops == 0
    adapters = step(method="lora", precision="bf16-no-autocast")
    # two factors of rank 8 beside each of a layer's seven matrices
    params = 6 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    assert adapters.wide_product_flops == 6 * 3 * 48 * params
    assert adapters.product_flops + adapters.wide_product_flops == narrow.product_flops
    prepared = {"method": "qlora", "quant": "nf4", "prepare_kbit": True}
    based = step(precision="bf16-no-autocast", **prepared)
    assert based.wide_product_flops == 6 * 3 * 48 * params + 4 * 3 * 48 * HEAD_WEIGHTS
    assert based.attention_flops == 0 < based.wide_attention_flops
    by_flash = step(precision="bf16-no-autocast", attn="flash_attention_2", **prepared)
    assert by_flash.wide_attention_flops == 0 < by_flash.attention_flops


def test_a_decoding_step_of_a_tiny_llama_by_hand() -> None:
    def step(**keys: Any) -> Work:
        job = tiny_job(phase="inference", **keys)
        return inference_work(
            job.model, job.run, job.dtypes, batch_size=2, context=100, decoding=True
        )

    counted = step()
    assert counted.product_flops == 2 * 2 * (6 * LAYER_WEIGHTS + HEAD_WEIGHTS)
    assert counted.weight_read_bytes == 2 * (6 * LAYER_WEIGHTS + HEAD_WEIGHTS)
    assert counted.attention_flops == 2 * 2 * 6 * 100 * 4 * 16 * 2
    # keys and values of 2 heads of 16: a dynamic cache is read and written, then read
    cache = 2 * 6 * 100 * 2 * 2 * 16 * 2
    assert counted.attention_bytes == 3 * cache
    assert step(kv_cache="static").attention_bytes == cache
    # eager attention reads those that are repeated for four heads instead of two
    eager = step(attn="eager")
    assert eager.attention_bytes == (2 + 2) * cache
    # it repeats them, moves 28 bytes per query, head and key (scores scaled 4, masked 4, widened 6,
    # softmax 8, narrowed 6), reads a mask, and lays out queries and results for its products
    moved = (1 + 2) * cache + 2 * 6 * (100 * (4 * 28 + 2) + 2 * 2 * 2 * 64)
    assert eager.elementwise_bytes - counted.elementwise_bytes == moved
    assert counted.elementwise_bytes == 2 * (6 * LAYER_MOVES + 12 * 320) + 6 * NORM_WEIGHTS
    assert counted.launches == 6 * LAYER_KERNELS + 22
    assert counted.engine_steps == counted.dequant_bytes == counted.optimizer_bytes == 0
    served = step(kv_cache="vllm")
    assert (served.launches, served.engine_steps) == (1, 1)


def test_a_prompt_of_a_tiny_llama_by_hand() -> None:
    job = tiny_job(phase="inference")
    counted = inference_work(
        job.model, job.run, job.dtypes, batch_size=2, context=100, decoding=False
    )
    assert counted.product_flops == 2 * (200 * 6 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS)
    assert counted.attention_flops == 200 * 6 * 100 * 4 * 32  # half of the scores
    assert counted.attention_bytes == 2 * 6 * 100 * 2 * 2 * 16 * 2
    assert counted.elementwise_bytes == 200 * 6 * LAYER_MOVES + 6 * NORM_WEIGHTS + 2 * 12 * 320


@pytest.mark.parametrize(
    ("quant", "most_rows"),
    [
        ("nf4", 32),  # on H100
        ("nf4-dq", 32),
        ("fp4", 32),
        ("gptq-int4", 50),
        ("gptq-int8", 50),
        ("awq-int4", 1024),
    ],
)
def test_a_kernel_unpacks_weights_itself_up_to_so_many_rows(quant: Any, most_rows: int) -> None:
    def moved(batch_size: int) -> float:
        job = tiny_job(phase="inference", quant=quant)
        return float(
            inference_work(
                job.model, job.run, job.dtypes, batch_size=batch_size, context=8, decoding=True
            ).dequant_bytes
        )

    assert moved(most_rows) < 6 * LAYER_WEIGHTS * 1.5  # what is stored, of 8 bits at most
    # what is stored is read, and 16 bits are written
    assert 6 * LAYER_WEIGHTS * 2.5 < moved(most_rows + 1) < 6 * LAYER_WEIGHTS * 3.2


@pytest.mark.parametrize(
    ("batch_size", "per_weight", "tables"),
    [
        (1, 4.5 / 8, 7),  # inside the kernel: codes, a scale of 64 weights, and the code table
        (2, 4.5 / 8 + 2, 7),  # written in 16 bit by a kernel, for a product that reads these
    ],
)
def test_before_0_50_a_single_row_unpacks_four_bits_inside_its_kernel(
    batch_size: int, per_weight: float, tables: int
) -> None:
    older = (("bitsandbytes", "0.49.2"),)
    job = tiny_job(phase="inference", quant="nf4", libraries=older)
    sixteen = tiny_job(phase="inference", quant="none")
    counted = inference_work(
        job.model, job.run, job.dtypes, batch_size=batch_size, context=8, decoding=True
    )
    per_layer = LAYER_WEIGHTS * per_weight + tables * CODE_TABLE_BYTES
    assert counted.dequant_bytes == 6 * per_layer
    wide = inference_work(
        sixteen.model, sixteen.run, sixteen.dtypes, batch_size=1, context=8, decoding=True
    )
    reads_all = counted.weight_read_bytes == pytest.approx(wide.weight_read_bytes)
    assert reads_all == (batch_size == 2)
    expands = batch_size == 2
    assert counted.launches == 6 * (LAYER_KERNELS + 7 * expands) + 22  # of 7 matrices
    assert counted.host_launches == 6 * 7 * (2 + 3 * expands)


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 2), (True, 3)])
def test_training_unpacks_four_bits_in_every_pass(checkpointing: bool, passes: int) -> None:
    job = tiny_job(method="qlora", gradient_checkpointing=checkpointing)
    assert training(job).dequant_bytes == pytest.approx(passes * 6 * LAYER_EXPANDED, rel=1e-3)


def test_operators_that_expand_gptq_run_in_forwards_alone() -> None:
    def counted(**keys: Any) -> Work:
        return training(tiny_job(method="qlora", quant="gptq-int4", **keys))

    kept, again = (counted(gradient_checkpointing=on) for on in (False, True))
    assert again.dequant_bytes == 2 * kept.dequant_bytes
    by_triton = counted(gradient_checkpointing=False, libraries=(("gptqmodel", "2.0.0"),))
    assert kept.dequant_bytes > 4 * by_triton.dequant_bytes  # which expands in the backward, too
    assert kept.launches - by_triton.launches == 6 * 7 * 12  # 7 matrices, 12 kernels of each


def test_eight_bits_are_expanded_for_the_backward_alone() -> None:
    def expanded(gpu: str, **keys: Any) -> float:
        job = resolve(
            families.build(TINY_LLAMA, name="tiny"),
            RunConfig(model="tiny", precision="bf16-pure", quant="int8", **keys),
            find_gpu(gpu),
        )
        if job.run.phase == "finetune":
            return float(training(job).dequant_bytes)
        return float(
            inference_work(
                job.model, job.run, job.dtypes, batch_size=9, context=8, decoding=True
            ).dequant_bytes
        )

    weights = 6 * LAYER_WEIGHTS
    assert expanded("h100-sxm-80gb", phase="inference") == 0
    # read, copied to 16 bits, and scaled in place
    trained: dict[str, Any] = {"method": "qlora", "gradient_checkpointing": True}
    assert expanded("h100-sxm-80gb", **trained) == pytest.approx(7 * weights, rel=0.02)
    assert expanded("cpu", **trained) == pytest.approx(3 * 7 * weights, rel=0.02)


@pytest.mark.parametrize(
    ("precision", "moved"),
    # as PyTorch moves them (the oracle above), but for products, and with a mask for four heads
    [("fp32", (24 + 1, 28)), ("bf16-pure", (28 + 0.5, 36)), ("fp16-pure", (20 + 0.5, 28))],
)
def test_score_matrices_move_so_many_bytes_per_head(
    precision: str, moved: tuple[float, float]
) -> None:
    job = tiny_job(method="full", attn="eager", precision=precision)
    assert moved_per_pair_and_head(job) == moved


def test_the_math_kernel_computes_16_bit_attention_in_fp32() -> None:
    job = tiny_job(method="full", precision="bf16-pure")
    on_t4 = resolve(job.model, replace(job.run, precision="bf16-pure"), find_gpu("t4-16gb"))
    fused, plain = training(job), training(on_t4)
    assert plain.attention_flops == 0
    assert fused.wide_attention_flops == 0
    # the whole square, and nothing computed again: 6 halves of twice the scores against 7
    assert plain.wide_attention_flops == fused.attention_flops * 2 * 6 / 7
    (attention,) = next(iter(job.model.layers()))[0].attentions
    kernels = list(work.kernels_of(attention, on_t4.dtypes, 100))
    assert kernels == [(1, "math", False)]
    # scores masked, through softmax, whose look for -inf is as large, and narrowed, which fp32 has
    # no need of: the mask of four heads is read once
    in_16_bit, in_fp32 = (
        moved_per_pair_and_head(
            resolve(job.model, replace(job.run, precision=precision), find_gpu("t4-16gb"))
        )[0]
        for precision in ("bf16-pure", "fp32")
    )
    assert (in_16_bit, in_fp32) == (8 + 8 + 2 + 6, 8 + 8 + 2)


def test_products_of_the_math_kernel_read_a_copy_in_fp32_for_every_query_head() -> None:
    job = tiny_job(phase="inference", kv_cache="static")
    on_t4 = resolve(job.model, job.run, find_gpu("t4-16gb"))
    fused, plain = (
        inference_work(
            one.model, one.run, one.dtypes, batch_size=2, context=100, decoding=True
        ).attention_bytes
        for one in (job, on_t4)
    )
    assert plain == 2 * 2 * fused  # two query heads for each of keys, twice as wide


@pytest.mark.parametrize(
    ("name", "attn", "kernels"),
    [
        ("llama", "sdpa", LAYER_KERNELS),
        ("llama", "eager", LAYER_KERNELS + 10),
        ("qwen3", "sdpa", LAYER_KERNELS + 2 * 8),  # norms of queries and keys
        # two norms; a product for queries, keys and values, and one out; no gate; gelu_new
        ("gpt2", "sdpa", 2 + 4 + 1 + 2 + 8 + 2),
    ],
)
def test_kernels_of_a_layer(name: str, attn: str, kernels: int) -> None:
    job = tiny_job(TINY[name] | {"model_type": name}, phase="inference", attn=attn)
    sizes = {"batch_size": 2, "context": 100, "decoding": False}
    counted = inference_work(job.model, job.run, job.dtypes, **sizes)
    assert counted.launches == job.model.num_hidden_layers * kernels + work.OUTSIDE_OPS


def test_an_evaluation_is_one_forward_that_scores_every_token() -> None:
    job = tiny_job(method="full")
    counted = training_work.evaluation_work(
        replace(running_model(job, 8), chip=UNKNOWN_CHIP),
        batch_size=3,
        seq_len=48,
        update=update_of(job),
    )
    tokens = 3 * 48
    weights = 6 * LAYER_WEIGHTS + HEAD_WEIGHTS
    assert counted.product_flops == 2 * tokens * weights
    assert counted.weight_read_bytes == 2 * weights
    assert counted.attention_flops == 6 * tokens * 48 * 4 * 32
    assert counted.optimizer_bytes == counted.attention_bytes == 0


def scored(head: str, trainer: str = "transformers", *, on: str = "l4-24gb") -> Work:
    """The work of a step of a batch whose rows are all scored."""
    run = RunConfig(model="m", method="full", trainer=trainer, loss_head=head)  # type: ignore[arg-type]
    config = TINY["llama"] | {"model_type": "llama"}
    job = resolve(families.build(config, name="m"), run, find_gpu(on))
    return training_work.training_work(
        replace(running_model(job, 8), chip=UNKNOWN_CHIP),
        batch_size=2,
        seq_len=48,
        logits_loss=job.trainer.logits_loss(job.run),
        update=update_of(job),
    )


def test_the_fused_head_of_trl_projects_once_more_in_its_backward() -> None:
    fused, usual = scored("trl-fused"), scored("hf")
    assert fused.product_flops - usual.product_flops == 2 * 2 * 48 * HEAD_WEIGHTS


def test_without_triton_the_tiles_of_trl_are_folded_operator_by_operator() -> None:
    on_gpu, on_cpu = (scored("trl-fused", on=on).elementwise_bytes for on in ("l4-24gb", "cpu"))
    assert on_cpu - on_gpu == 2 * 48 * 320 * (174 - 16)


def test_without_triton_log_probabilities_of_logits_are_made_by_rows() -> None:
    by_kernel, by_rows = (
        scored("hf", "orpo", on=on).elementwise_bytes - scored("hf", on=on).elementwise_bytes
        for on in ("l4-24gb", "cpu")
    )
    assert by_rows - by_kernel == 2 * 48 * 320 * (88 - 28)


def test_a_loop_over_experts_asks_each_for_its_rows() -> None:
    name = "Qwen/Qwen1.5-MoE-A2.7B"
    grouped = RunConfig(model=name, phase="inference")
    looped = replace(grouped, libraries=(("transformers", "4.38.2"),))
    layers = [job_of(run).model.groups[-1].layer for run in (grouped, looped)]
    assert [work.loop_ops(layer) for layer in layers] == [0, 60 * work.LOOP_OPS]
    few, many = (inference(run, context=1, decoding=True).launches for run in (grouped, looped))
    assert many - few >= 24 * 60 * work.LOOP_OPS


def test_a_token_of_a_mixture_visits_its_experts_alone() -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    job = tiny_job(config, phase="inference", precision="fp16-pure")  # no kernel groups experts
    attention, router, expert = 64 * (64 + 32 + 32 + 64), 64 * 8, 3 * 64 * 96
    for batch_size, visited in ((1, 2), (3, 6), (5, 8)):
        counted = inference_work(
            job.model, job.run, job.dtypes, batch_size=batch_size, context=10, decoding=True
        )
        in_token = 2 * (attention + router + 2 * expert) + HEAD_WEIGHTS
        assert counted.product_flops == 2 * batch_size * in_token
        read = 2 * (attention + router + visited * expert) + HEAD_WEIGHTS
        assert counted.weight_read_bytes == pytest.approx(2 * read)
        # norms and attention as in a Llama; routing, sorted rows, grouped products and their sums
        assert counted.launches == 22 + 2 * (LAYER_KERNELS - 5 + 22)
        # two products of each expert that is visited, which C++ launches
        assert counted.autograd_launches == 2 * 2 * visited


@pytest.mark.parametrize(("checkpointing", "forwards"), [(False, 1), (True, 2)])
def test_autocast_narrows_every_matrix_of_an_fp32_base_once_a_forward(
    checkpointing: bool, forwards: int
) -> None:
    usual = {"method": "lora", "gradient_checkpointing": checkpointing}
    job = tiny_job(precision="bf16", base_dtype="float32", **usual)
    single, double = (training(job, batch_size=n, seq_len=48).elementwise_bytes for n in (1, 2))
    narrow = tiny_job(precision="bf16", **usual)
    few, many = (training(narrow, batch_size=n, seq_len=48).elementwise_bytes for n in (1, 2))
    # whatever the number of tokens: 4 bytes read and 2 written of each element, of the head's, too
    weights = forwards * 6 * LAYER_WEIGHTS + HEAD_WEIGHTS
    # a repeated forward ends with the last tensor that its backward reads
    of_weights = (2 * single - double) - (2 * few - many)
    assert of_weights == pytest.approx(weights * (4 + 2), rel=0.06 if checkpointing else 0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fp32_products_with_4_bit_weights_are_those_of_every_pass(checkpointing: bool) -> None:
    usual = {"method": "qlora", "prepare_kbit": False, "gradient_checkpointing": checkpointing}
    sizes = {"batch_size": 3, "seq_len": 48}
    plain = training(tiny_job(precision="bf16-pure", **usual), **sizes)
    wide = training(tiny_job(precision="bf16-pure", compute_dtype="float32", **usual), **sizes)
    passes = 2 + checkpointing
    of_layers = 2 * passes * 3 * 48 * 6 * LAYER_WEIGHTS
    assert (plain.wide_product_flops, wide.wide_product_flops) == (0, of_layers)
    assert wide.product_flops == plain.product_flops - of_layers
    # expanded to 4 bytes in place of 2, and in the backward from 2 to 4
    moved = wide.elementwise_bytes - plain.elementwise_bytes
    assert moved > 6 * LAYER_WEIGHTS * (2 * (1 + checkpointing) + 6)


def test_autocast_multiplies_in_16_bit_whatever_4_bit_weights_compute_in() -> None:
    usual = {"method": "qlora", "precision": "bf16", "prepare_kbit": False}
    sizes = {"batch_size": 3, "seq_len": 48}
    plain = training(tiny_job(**usual), **sizes)
    wide = training(tiny_job(compute_dtype="float32", **usual), **sizes)
    assert (wide.product_flops, wide.wide_product_flops) == (plain.product_flops, 0)
    # each weight 2 bytes wider, then read in 4 and written in 2
    moved = wide.elementwise_bytes - plain.elementwise_bytes
    assert moved > 6 * LAYER_WEIGHTS * (2 + 4 + 2)


def test_a_prompt_has_fp32_products_where_they_are_asked_for() -> None:
    usual = {"phase": "inference", "quant": "nf4", "precision": "bf16"}
    job = tiny_job(compute_dtype="float32", **usual)
    for decoding in (False, True):
        counted = inference_work(
            job.model, job.run, job.dtypes, batch_size=2, context=32, decoding=decoding
        )
        rows = 2 if decoding else 64
        assert counted.wide_product_flops == 2 * rows * 6 * LAYER_WEIGHTS


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_evaluation_unpacks_what_one_forward_does(checkpointing: bool) -> None:
    job = tiny_job(method="qlora", r=8, gradient_checkpointing=checkpointing)
    counted = training_work.evaluation_work(
        replace(running_model(job, 8), chip=UNKNOWN_CHIP),
        batch_size=3,
        seq_len=48,
        update=update_of(job),
    )
    assert counted.dequant_bytes == pytest.approx(6 * LAYER_EXPANDED, rel=1e-3)
    assert counted.optimizer_bytes == counted.attention_bytes == 0


@pytest.mark.parametrize("backend", ["quanto", "fp8"])
def test_a_step_launches_what_expands_each_layers_cache(backend: Any) -> None:
    job = tiny_job(
        phase="inference",
        kv_cache="quantized",
        cache_backend=backend,
        **({} if backend == "fp8" else {"cache_group_size": 32}),
    )
    plain = tiny_job(phase="inference")
    launches = []
    for one in (job, plain):
        done = inference_work(
            one.model, one.run, one.dtypes, batch_size=2, context=100, decoding=True
        )
        launches.append(done.launches)
    converted = serving_work.conversion(job.run, job.dtypes, decoding=True)
    assert launches[0] - launches[1] == 6 * converted.launches > 6 * 9
    if backend == "fp8":  # nothing gathers, so that no step quantises all tokens anew
        assert converted == expanding(job.run.cache_format, 2)  # type: ignore[arg-type]


def test_an_encoder_that_classifies_makes_no_logits_of_words() -> None:
    spec = families.build({"model_type": "bert", "num_hidden_layers": 2}, name="m")
    run = RunConfig(model="m", method="full", precision="fp32", phase="inference")
    resolved = resolve(spec, run, find_gpu("a100-sxm-80gb"))
    fills, classifies = (
        inference_work(model, run, resolved.dtypes, batch_size=4, context=64, decoding=False)
        for model in (spec, replace(spec, masked_head=None))
    )
    words, transform = work.head_weights(spec)
    assert fills.product_flops - classifies.product_flops == 2 * 4 * 64 * (words + transform)
    assert fills.elementwise_bytes - classifies.elementwise_bytes == 12 * 4 * 64 * spec.vocab_size
