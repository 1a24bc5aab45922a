"""Which dtype every kind of tensor has in one run: the precision mode, resolved.

The same job differs by gigabytes between stacks, because PEFT, autocast and the k-bit
preparation each make copies. The modes and what each keeps alive are derived in
`docs/memory.md`; the letters are used there and below:

P  pure 16 bit: adapters in the base dtype, no autocast
A  autocast: 16-bit base, fp32 adapters, the Trainer's `bf16=True`
C  16-bit base, fp32 adapters, no autocast
Q  a base prepared by `prepare_model_for_kbit_training`, under autocast
F  everything fp32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from whichlora.spec.backends import Backend, backend_of
from whichlora.spec.kernels import NO_KERNELS, FusedKernels
from whichlora.spec.layer import Linear
from whichlora.spec.run import (
    AUTOCAST_PRECISIONS,
    BNB_QUANTS,
    ENGINE_QUANTS,
    FOUR_BIT_BNB,
    FP32_PRECISIONS,
    MOST_COUNT,
    CacheFormat,
    RunConfig,
)
from whichlora.spec.versions import Libraries

BNB_BLOCK = 64  # weights that share one absmax scale; what else is stored is in `memory.weights`
Mode = Literal["P", "A", "C", "Q", "F"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Bytes per element of every kind of tensor, and which copies are made.

    Args:
        mode: one of the letters above.
        quant: storage of the quantisable base weights.
        quant_group_size: weights that share a scale in GPTQ and AWQ.
        base_bytes: weights that are not quantised inside the layers (norms, biases).
        embedding_bytes: embeddings and head.
        stream_bytes: the residual stream.
        compute_bytes: matrix products and attention.
        half_bytes: what the precision names: 4 in fp32 and tf32, else 2. Weights are loaded so.
        four_bit_bytes: what 4-bit matrices cast their input to, and expand their weights to.
        recasts_four_bit: that is the other dtype of 16 bit than the run's.
        mlp_bytes: what the MLP's projections return.
        linear_out_bytes: what a frozen base projection returns.
        loss_bytes: a loss that does not widen its logits by itself.
        adapter_bytes: trained adapter weights, their gradients and optimizer states.
        adapter_product_bytes: what A and B return.
        narrows_adapters_later: PEFT made the adapters in fp32, and they were cast by name then.
        autocast: it copies what is trained, or what is read, to 16 bit.
        under_autocast: the step runs in an autocast region.
        adapters_drop: adapter dropout drops values; a trainer may leave the module and set its
            probability to 0, as TRL's `disable_dropout` does.
        widens_cross_entropy: autocast runs a loss of narrow logits in fp32 as a whole, as
            `Backend.widens_cross_entropy` says.
        training: dropout is on and tensors are kept for backward.
        half: which of the 16-bit dtypes, "bf16" or "fp16": older devices lack kernels for one.
        device_kind: "cuda", "cpu", …, a key of `spec.backends`.
        kernel_buffers: what a GPU's kernels allocate for themselves counts; no trace sees it.
        fused_fp16_softmax: a softmax in fp32 of fp16 scores makes no copy of them first.
        compute_capability: of the device, as its datasheet facts state it; None where unknown.
        libraries: their versions; older ones keep other things.
        narrow_head: it is in 16 bit, whatever the embeddings are.
        quantises_experts: those in one parameter are stored in 4 bit, too.
        quantises_head: a head that is no table is stored as the other matrices are.
        copies_four_bit: adapters add to a copy of what a 4-bit matrix returns, as PEFT's do.
        casts_expanded: 4-bit codes are made of fp16 weights, so that each expansion is cast to the
            dtype of the product, which is another.
        wide_expert_biases: those of experts in mxfp4 are fp32 parameters.
        linears_keep_inputs: `F.linear` of a frozen matrix keeps its input for the backward, too.
        kernels: operators of the layers that the trainer replaces.
        prefix_tokens: keys and values that stand before each sequence's own while it trains.
        learns_encoder: what cross attention reads needs a gradient.
        encoder_bytes: one element of it, where a matrix makes it of images; else 0.
        stores: the format that a layer's keys and values are quantised to in this forward, if any.
        scale_block: edge of the squares of a matrix in 8-bit floats that share a scale; 0: each row
            has one.
        loads_at_once: loading first asks the device for one block, from which the weights are cut:
            `caching_allocator_warmup` of transformers 5.23, which runs where there is a device_map,
            as bitsandbytes makes one (`update_device_map`). Else the model is loaded to the host
            and moved tensor by tensor, as `Trainer.__init__` does.
        copied_bytes: one element of copies of modules that are trained as a whole; 0: as wide as
            the embeddings.
        finds_outliers: products in 8 bit look for inputs that reach a threshold.
    """

    mode: Mode
    quant: str
    quant_group_size: int
    base_bytes: int
    embedding_bytes: int
    stream_bytes: int
    compute_bytes: int
    half_bytes: int
    four_bit_bytes: int
    mlp_bytes: int
    linear_out_bytes: int
    loss_bytes: int
    adapter_bytes: int
    adapter_product_bytes: int
    narrows_adapters_later: bool
    autocast: bool
    under_autocast: bool
    lora_dropout: float
    training: bool
    attn: str
    padded: bool
    trains_base: bool
    half: str
    device_kind: str
    kernel_buffers: bool
    fused_fp16_softmax: bool
    compute_capability: str | None
    libraries: Libraries
    stores: CacheFormat | None = None
    scale_block: int = 0
    learns_encoder: bool = True
    encoder_bytes: int = 0
    prefix_tokens: int = 0
    adapters_drop: bool = False
    quantises_experts: bool = False
    quantises_head: bool = False
    copies_four_bit: bool = True
    casts_expanded: bool = False
    narrow_head: bool = False
    wide_expert_biases: bool = False
    linears_keep_inputs: bool = False
    loads_at_once: bool = False
    copied_bytes: int = 0
    finds_outliers: bool = True
    recasts_four_bit: bool = False
    widens_cross_entropy: bool = False
    kernels: FusedKernels = NO_KERNELS

    @property
    def backend(self) -> Backend:
        """What kernels there keep, beside the dtypes."""
        return backend_of(self.device_kind)

    @property
    def copy_bytes(self) -> int:
        """One element of the embedding or the head that is copied and trained as a whole."""
        return self.copied_bytes or self.embedding_bytes

    @property
    def head_bytes(self) -> int:
        """One element of a head that is not tied to the embeddings, or of both."""
        return 2 if self.narrow_head else self.embedding_bytes

    @property
    def widens_products(self) -> bool:
        """Whether products but those with quantised weights are in fp32 in a run of 16 bit."""
        return self.compute_bytes > self.half_bytes

    @property
    def widens_adapters(self) -> bool:
        """Whether the adapters' products are, as PEFT's are without autocast.

        Source: peft 0.21.2 `BaseTuner._cast_adapter_dtype`, `BaseTunerLayer._cast_input_dtype`.
        """
        return self.adapter_product_bytes > self.half_bytes

    @property
    def autocasts_four_bit(self) -> bool:
        """Whether autocast casts a 4-bit matrix's input and weight again, inside its operator.

        The product is then in the run's 16 bits, whatever its compute dtype.
        Kind: exact, run. Source: bitsandbytes 0.50.2 `_dequant_linear_fallback`, whose `F.linear`
        autocast reaches (`tests/memory/test_compute_dtype_oracle.py`).
        """
        return self.under_autocast and self.computes_four_bit_apart

    @property
    def computes_four_bit_apart(self) -> bool:
        """Whether 4-bit matrices cast their input to a dtype that the rest does not compute in."""
        return self.four_bit_bytes > self.half_bytes or self.recasts_four_bit

    @property
    def widens_four_bit(self) -> bool:
        """Whether products with 4-bit weights are in fp32 in a run of 16 bit."""
        return self.four_bit_bytes > self.half_bytes and not self.under_autocast

    @property
    def four_bit_product_bytes(self) -> int:
        """One element of what a product with a 4-bit weight reads and writes."""
        return self.half_bytes if self.autocasts_four_bit else self.four_bit_bytes

    @property
    def widens_layer_norm(self) -> bool:
        """Whether a LayerNorm returns fp32, whatever it is given: that of CUDA's autocast does."""
        widens = self.under_autocast and self.backend.widens_norms
        return widens and not self.kernels.narrow_layer_norm

    @property
    def uses_sdpa(self) -> bool:
        """Whether torch's SDPA was asked for, whatever kernel of it."""
        return self.attn.startswith("sdpa")


def has_master_weights(run: RunConfig, *, trains_base: bool) -> bool:
    """Whether a base in fp32 is trained, or adapted, under 16-bit autocast.

    Training it in fp16 needs one: the gradient scaler refuses fp16 gradients.
    """
    if run.phase == "inference":
        return False
    return run.base_dtype == "float32" or (run.precision == "fp16" and trains_base)


def resolve_dtypes(
    run: RunConfig,
    *,
    trains_base: bool,
    device_kind: str,
    compute_capability: str | None = None,
    widens_result: bool = False,
    narrows_adapters: bool = False,
) -> Dtypes:
    """The stack that `run`, its defaults filled in, gets from transformers, PEFT, bitsandbytes.

    Args:
        narrows_adapters: the trainer casts those of a quantised base to 16 bit.
        widens_result: the adapters multiply a layer's result by a parameter that stays fp32.

    Source: MODES of `docs/memory.md`, read and traced on transformers 5.23, peft 0.21.2.
    """
    quant, precision, narrow = run.quant or "none", run.precision, run.narrows_adapters
    training, backend = run.phase == "finetune", backend_of(device_kind)
    half = 4 if precision in FP32_PRECISIONS else 2
    prepared = training and bool(run.prepare_kbit) and quant in BNB_QUANTS
    autocast = training and precision in AUTOCAST_PRECISIONS
    wide_base = has_master_weights(run, trains_base=trains_base)  # under autocast alone
    stored = 4 if wide_base or prepared else half
    # PEFT's 4-bit and 8-bit layers cast their result back where autocast is off alone, so that it
    # makes the stream fp32 from the first layer on: peft 0.21.2 `lora.bnb.Linear4bit.forward`
    wide_result = widens_result and autocast and quant in BNB_QUANTS and not narrow

    if half == 4 or (prepared and not autocast):
        mode: Mode = "F"  # fp32 norms of a prepared base promote the whole stream
    else:
        is_widened = prepared or wide_base or wide_result
        mode = "Q" if is_widened else _narrow_mode(run, autocast=autocast, trains_base=trains_base)

    cast_by_autocast = mode == "P" and autocast and not trains_base
    by_trl = narrows_adapters and run.adapter_dtype == "auto" and (cast_by_autocast or wide_result)
    fp32_adapters = not narrow and not by_trl and (mode != "P" or cast_by_autocast)
    wide = mode in ("Q", "F")
    return Dtypes(
        mode=mode,
        quant=quant,
        quant_group_size=run.quant_group_size,
        base_bytes=stored,
        embedding_bytes=half if prepared and run.versions.trl_narrows_embeddings else stored,
        stream_bytes=4 if wide else 2,
        compute_bytes=4 if mode == "F" else 2,
        **_four_bit_compute(run, quant, half),  # whatever the preparation made of the rest
        mlp_bytes=4 if wide and not wide_base else 2,
        linear_out_bytes=4 if wide and not wide_base else 2,
        loss_bytes=4 if autocast or mode == "F" else half,  # autocast widens cross entropy
        adapter_bytes=4 if fp32_adapters else 2,
        autocast=autocast and (mode in ("A", "Q") or (mode == "P" and fp32_adapters)),
        under_autocast=autocast,
        # PEFT asks the base's weight for the adapters' dtype: only a 4-bit one's state tells it
        narrows_adapters_later=not (fp32_adapters or (narrow and quant in ("none", *FOUR_BIT_BNB))),
        adapter_product_bytes=4 if mode in ("C", "F") and fp32_adapters else 2,
        lora_dropout=run.lora_dropout if training else 0.0,
        adapters_drop=_drops(run),
        training=training,
        attn=run.attn,
        padded=run.padding == "padded",
        trains_base=trains_base,
        half="fp16" if precision.startswith("fp16") else "bf16",
        device_kind=device_kind,
        kernel_buffers=backend.multiplies_before_softmax,
        fused_fp16_softmax=precision.startswith("fp16") and backend.fuses_half_softmax,
        compute_capability=compute_capability,
        libraries=run.versions,
        quantises_experts=run.quantize_moe_experts,
        wide_expert_biases=quant == "mxfp4" and not run.has_engine_kernels,
        widens_cross_entropy=backend.widens_cross_entropy,
        loads_at_once=quant in BNB_QUANTS,
        finds_outliers=run.llm_int8_threshold > 0,
    )


def _four_bit_compute(run: RunConfig, quant: str, half: int) -> dict[str, Any]:
    """Fields of what 4-bit products compute in, beside `half`.

    Kind: exact. Source: bitsandbytes 0.50.2 `Linear4bit.__init__`, `forward`; serving engines have
    kernels of their own.
    """
    compute_dtype = run.compute_dtype
    run_dtype = "float16" if run.precision.startswith("fp16") else "bfloat16"
    follows = run_dtype == "bfloat16" and run.versions.linear4bit_follows_input
    if quant not in FOUR_BIT_BNB or run.has_engine_kernels or compute_dtype == "auto" or follows:
        return {"half_bytes": half, "four_bit_bytes": half}
    size = 4 if compute_dtype == "float32" else half
    recasts = compute_dtype not in ("float32", run_dtype)
    return {"half_bytes": half, "four_bit_bytes": size, "recasts_four_bit": recasts}


def _drops(run: RunConfig) -> bool:
    """Whether the adapters drop values of their inputs."""
    has_dropout = run.phase == "finetune" and run.lora_dropout > 0
    return has_dropout and not run.trainer_option("disable_dropout")


def _narrow_mode(run: RunConfig, *, autocast: bool, trains_base: bool) -> Mode:
    """The mode of a base in 16 bit whose stream is in 16 bit, too."""
    if autocast:
        # PEFT's 4-bit layers leave the cast to autocast, so that targets share their input; so
        # they do where adapters are as wide as the stream.
        shared = run.quant in BNB_QUANTS or trains_base or run.narrows_adapters
        return "P" if shared else "A"
    has_adapters = not trains_base and (run.phase == "finetune" or run.serve == "as-trained")
    return "C" if has_adapters and not run.narrows_adapters else "P"


# Rows up to which a product unpacks weights inside its kernel. Kind: estimate, what the kernels'
# authors state.
# Exllama's first kernel unpacks inside for fewer than 8. Source: AutoGPTQ 0.5.1
# `matmul_recons_thd` of modeling/_utils.py; exllamav2 `MAX_Q_GEMM_ROWS`.
EXLLAMA_ROWS = 7
_FUSED_ROWS = {"gptq-int4": 50, "gptq-int8": 50, "awq-int4": 1024, "mxfp4": MOST_COUNT}


def fused_rows(dtypes: Dtypes) -> int:
    """Rows up to which a product with quantised weights does not write them out in 16 bit first."""
    if dtypes.quant == "awq-int4" and not dtypes.libraries.expands_awq:
        return MOST_COUNT
    if exllama_kernels(dtypes) == 1:
        return EXLLAMA_ROWS
    if dtypes.quant not in FOUR_BIT_BNB:
        return _FUSED_ROWS.get(dtypes.quant, 0)
    product = "fp32" if dtypes.four_bit_bytes == 4 else dtypes.half
    return dtypes.libraries.fused_4bit_rows(dtypes.device_kind, dtypes.compute_capability, product)


def expands_by_operators(dtypes: Dtypes) -> bool:
    """Whether torch's operators expand GPTQ's codes: in training, whose backward reads the result.

    Kind: exact. Source: `Libraries.trains_gptq_by_triton`.
    """
    by_triton = dtypes.libraries.trains_gptq_by_triton and dtypes.backend.has_triton
    return dtypes.training and dtypes.quant in ("gptq-int4", "gptq-int8") and not by_triton


def exllama_kernels(dtypes: Dtypes) -> int:
    """Which of exllama's kernels multiply, 1 or 2; 0 for none. They neither train nor take 8 bits.

    Kind: exact. Source: `Libraries.exllama_kernels`; AutoGPTQ 0.5.1 qlinear_exllama.py and
    qlinear_exllamav2.py, `QuantLinear.__init__`.
    """
    multiplies = dtypes.quant == "gptq-int4" and not dtypes.training
    return dtypes.libraries.exllama_kernels * multiplies


def is_quantised(linear: Linear, dtypes: Dtypes) -> bool:
    """Whether `linear` is stored in few bits: experts kept as 3-D parameters are where asked for.

    Source: bitsandbytes 0.50.2 `replace_parameter_4bit`, which Axolotl's `quantize_moe_experts`
    calls for each of them; transformers 5.23 `Mxfp4GptOssExperts`, which packs nothing else.
    """
    if dtypes.quant == "mxfp4" or not linear.is_module:
        packs = dtypes.quantises_experts or dtypes.quant in {"mxfp4", *ENGINE_QUANTS}
        return packs and not linear.is_module and linear.count > 1 and linear.quantisable
    if linear.is_subclass and not dtypes.libraries.quantises_subclasses:
        return False
    return dtypes.quant != "none" and linear.is_module and linear.quantisable


def quantises_head(head: Linear, dtypes: Dtypes) -> bool:
    """Whether the codes of `head` are stored, which transformers leaves as it is. Kind: exact.

    Source: `Dtypes.quantises_head`; transformers 5.23 `get_keys_to_not_convert`.
    """
    return dtypes.quantises_head and is_quantised(head, dtypes)


def runs_adapter(linear: Linear, dtypes: Dtypes) -> bool:
    """Whether the adapter of `linear` runs, so that it gets a gradient. Source: `weight_only`."""
    return linear.active > 0 and (not linear.weight_only or is_quantised(linear, dtypes))
