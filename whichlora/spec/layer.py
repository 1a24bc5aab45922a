"""The matrices, norms, attentions and feed-forwards of one layer. Shapes are per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from whichlora.errors import ConfigError
from whichlora.spec.numeric import Count, ceil_div, floor_div

UNTIL_TODAY = "999"  # a release that is newer than all
NormKind = Literal[
    "rms",
    "rms_offset",
    "rms_wide",
    "rms_narrow",
    "rms_power",
    "rms_mixed",
    "layer",
    "layer_steps",
    "layer_narrow",
]
WideRotation = Literal["", "inline", "named"]
PositionTables = Literal["stream", "fp32", "fp32_narrowed"]
Routing = Literal[
    "softmax",
    "softmax_wide",
    "softmax_fp32",
    "softmax_exact",
    "softmax_as_input",
    "sigmoid",
    "sigmoid_divided",
    "sigmoid_wide",
    "sigmoid_narrow",
    "chosen",
    "sparse_mixer",
    "scaled",
    "largest",
]
Projection = Literal[
    "plain",
    "scaled",
    "scaled_keys",
    "gated",
    "copied",
    "copied_keys",
    "joined",
    "latent",
    "latent_complex",
    "latent_halves",
    "one_by_one",
    "one_by_one_shared",
    "one_after_other",
    "borrowed",
    "complex_by_head",
    "contiguous",
    "queries_first",
]
EagerScores = Literal["scaled", "scaled_queries", "beside_sum", "bounded", "named", "fp32", "sinks"]
AddedMask = Literal["", "stream", "weights", "product"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Weight matrices of one name in one layer: `y = x @ W.T (+ bias)`.

    Args:
        name: leaf module name, as `target_modules` of PEFT sees it.
        reads: label of the tensor it reads; linears with one label share one input.
        count: how many such matrices the layer holds (experts that are separate modules).
        active: how many of them each token passes through; 0: its weight gets no gradient.
        is_module: an `nn.Linear` or `Conv1D`, so that it can take an adapter and be quantised;
            False for a slice of a 3-D expert parameter or of any other bare parameter.
        quantisable: bitsandbytes converts it; False for what transformers keeps in fp32 (T5's
            `wo`).
        is_subclass: of a class derived from `nn.Linear` (Falcon's), which transformers 5 does not
            convert.
        transposed: a `Conv1D`, whose weight is [in, out] (GPT-2).
        adapter_rank: how many times the asked rank its adapter gets from PEFT, 0 for none; None
            for the rule: 1 for a module, 0 for a bare parameter.
        asked_as: names that PEFT takes for this parameter: those that its parts had as modules in
            transformers 4.
        needs_all: a user has to give all of them (PEFT); else one means all (Unsloth).
        is_refused: PEFT raises an error where it is among the targets, "all-linear" included
            (`out_proj` of Mamba), so that targets are given by name.
        weight_only: the class multiplies by the weight without calling the module, whose adapter
            then does nothing, unless the matrix is quantised (Jamba's `dt_proj`).
        clamped: what it reads and what it returns are clamped (Gemma 4's tower).
        clamps_weight: training clamps its weight, which packed weights refuse (Gemma 3n).
        casts_input: the class casts what it reads to the dtype of its weight, which is that of
            bytes where 4 bits are packed.
        looked_up: ids pick its rows, so that its adapter has one product, not two.
    """

    name: str
    in_features: int
    out_features: int
    reads: str
    bias: bool = False
    count: int = 1
    active: int = 1
    is_module: bool = True
    transposed: bool = False
    adapter_rank: int | None = None
    asked_as: tuple[str, ...] = ()
    needs_all: bool = True
    quantisable: bool = True
    is_subclass: bool = False
    is_refused: bool = False
    weight_only: bool = False
    clamped: bool = False
    clamps_weight: bool = False
    casts_input: bool = False
    looked_up: bool = False

    @property
    def rank_multiple(self) -> int:
        """Rank of its adapter over the asked rank; 0 where PEFT adds none."""
        if self.is_refused:
            return 0
        return int(self.is_module) if self.adapter_rank is None else self.adapter_rank

    def is_stored_in(self, quant: str) -> bool:
        """Whether a base in `quant` has codes of it, and not the weight itself."""
        return quant != "none" and self.quantisable

    @property
    def num_weights(self) -> int:
        """Elements of the matrices, biases left out."""
        return self.count * self.in_features * self.out_features

    @property
    def num_params(self) -> int:
        return self.num_weights + (self.count * self.out_features if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalisation over `width` elements, applied to `rows` vectors of every token.

    Args:
        kind: "rms" computes in fp32 and scales the result cast back to the stream's dtype
            (Llama); "rms_wide" scales it in fp32 before (OLMo 2), "rms_offset" by (1 + weight)
            (Gemma), "rms_power" as "rms_wide", its deviation being a power (Gemma 4); "rms_narrow"
            has nothing in fp32 (lit-gpt of 2023); "layer" is `nn.LayerNorm`; "rms_mixed"
            multiplies the 16-bit input by the fp32 deviation (T5); "layer_steps" is LayerNorm
            written out in fp32 operators (Cohere); "layer_narrow" is LayerNorm that follows
            autocast's dtype (Nemotron).
        rows: 1 for the hidden state, the number of heads for a norm over one head.
        separate: how many modules it is, each of a part of `width`, whose results are joined; 0
            for one.
    """

    name: str
    kind: NormKind
    width: int
    rows: int = 1
    weight: bool = True
    bias: bool = False
    separate: int = 0

    @property
    def num_params(self) -> int:
        return self.width * (int(self.weight) + int(self.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Attention in overlapping chunks: a query sees `one_sided` tokens before and after it.

    Args:
        one_sided: half of a chunk; the next chunk begins so many tokens later.
        padded_to: tokens that sequences are padded to a multiple of, before the first layer.
        batched: the batch has several sequences, so that rows of tokens are laid out anew.
        single: each sequence is one chunk.

    Source: Beltagy et al. 2020, arXiv:2004.05150; transformers 5.23 `LEDEncoderSelfAttention`.
    """

    one_sided: int
    padded_to: int
    batched: bool = True
    single: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseKeys:
    """Which keys each query sees: those of most score, which a small attention of its own makes.

    Nothing of it gets a gradient: it runs without a graph, and its matrices are not `active`.

    Args:
        num_heads: of its queries, all of which have one key; 0: it takes what the last layer chose.
        head_dim: of each of them.
        top_k: keys that a query sees.
        norm: over its keys.
        interleaved: they are rotated as the latents' are, else half against half.
        hands_on: the model's loop hands what was chosen on to the next layer.
        follows: so it is handed what the layer before has.
        batched: the batch has several sequences, so that a product lays keys out for every query.
        has_all: a sequence has no more keys than `top_k`.

    Source: DeepSeek-V3.2, arXiv:2512.02556; transformers 5.23 `DeepseekV32Indexer`.
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm: Norm | None = None
    interleaved: bool = False
    hands_on: bool = False
    follows: bool = False
    batched: bool = False
    has_all: bool = False

    @property
    def num_params(self) -> int:
        """Beside its matrices."""
        return 0 if self.norm is None else self.norm.num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One mixing block: softmax attention, or a recurrent / convolutional replacement of it.

    Args:
        kind: "softmax", "linear" (gated delta net: a state of fixed size), "mamba1" or "mamba2"
            (so the state space of Mamba, whose channels are heads that share one key, or of Mamba
            2, whose groups of heads share one) or "conv" (short convolution).
        linears: its projections, in the order the forward applies them.
        head_dim: width of one query or key head; `v_head_dim` of one value head.
        position: how positions enter: "rope", "alibi", "relative" (a bias per head) or "none"
            (learned absolute embeddings belong to the embeddings).
        biases_each_sequence: the bias of "relative" is one for all layers, written out for every
            sequence, and added in place (MPNet).
        biases_each_layer: every layer makes the bias of "relative" anew (UMT5); else the first of
            a stack hands its own on.
        rotary_dim: leading part of each head that is rotated.
        sliding_window: tokens a query sees, None for all.
        softcap: tanh soft cap on the scores (Gemma 2).
        cross: keys and values come from the encoder.
        memory_len: positions of its output, whatever the length of the text; 0: as many as it has.
        cache_elements: elements per token that a KV cache keeps for this layer.
        state_elements: elements per sequence of a cache of fixed size (convolutions);
            `recurrent_elements` of one that is in fp32 whatever the model is.
        conv_kernel: tokens that a short convolution reads; transformers keeps as many, engines all
            but the last.
        recurrent_dtype: in which engines keep those elements, where the config says; else the
            model's.
        chunk_size: tokens that a block with such a state takes at once, or that are one of
            `in_blocks`.
        in_blocks: queries see their own block and its two neighbours, all of them written out
            (LongT5); with `summed_tokens`, sums of as many tokens each, too.
        masks_keys: the model adds a mask to the scores whatever the batch, one row for each
            sequence (Switch Transformers).
        masks_keys_until: the release of transformers that ended this (BERT); empty: none did.
        other_params: bare parameters: sinks, convolution kernels, decay vectors.
        dropout: probability that a trained model drops an attention weight.
        sdpa: what a request for SDPA ends in: the "fused" kernel, "math" where the shapes rule
            that out (Falcon's broadcast key head), "eager" where the class has no SDPA.
        flash: the class takes flash-attention 2; transformers refuses to load one that does not.
        projection: which function makes queries, keys and values (`symbolic.attention` has
            them by name): "plain" of one matrix or three; "scaled", queries before they are
            rotated (ESM), or in a state space what it reads and projects, "scaled_keys", so of
            keys (Falcon-H1); "gated", whose queries come with a gate on the output (Qwen3-Next);
            "copied" out of a fused projection, keys and values to every query head (Falcon's new
            architecture, CodeGen), or "copied_keys", these and values as they are (Falcon with
            one key head); "joined", one product of all three matrices, whose adapters are one, too
            (LitGPT); "latent" from low-rank latents, whose rotation is written in single
            operators, in complex numbers, "latent_complex" (DeepSeek), or as of Llama,
            "latent_halves" (MiniCPM3); "one_by_one", each
            with a norm, also with one projection for keys and values, "one_by_one_shared", or
            with those of an earlier layer, "borrowed" (Gemma 4), or each projected after the one
            before is done, "one_after_other" (its tower); "complex_by_head", rotated in
            complex numbers before their norms (Llama 4); "contiguous", copied head by head, queries
            scaled before (Whisper); "queries_first", with their norm before there are keys, which
            come from images (Llama 3.2 Vision).
        out_norm: over what the output projection reads (BitNet).
        has_temperature: queries are multiplied by a number for each position (Llama 4,
            Ministral 3).
        eager: which function makes the scores in eager code: "scaled"; products of
            "scaled_queries" (MVP), or of those that were scaled before, "bounded" by the least
            number behind the mask (OPT before 4.49); "beside_sum", which live beside their sum with
            the mask until the softmax is done (Falcon); "named", one fused product whose operands
            the class names until it returns (BLOOM); of queries and keys in "fp32" (GPT-J,
            GPT-Neo); with "sinks", one more logit for each head, which no value belongs to
            (gpt-oss).
        rotated_parts: parts of each head that are rotated apart, one for each axis of an image,
            and concatenated.
        joins_rotation: rotated and unrotated parts of the heads are concatenated, so that
            queries and keys are contiguous per head.
        relative_rows: entries of the table of relative positions that queries and keys are
            multiplied with (DeBERTa).
        wide_rotation: queries and keys are rotated in fp32: "inline", each widened where it is
            multiplied (ModernBERT), or "named", by variables that live until both are rotated
            (Cohere, towers of images); "" for neither.
        tables: those of positions have the dtype of the "stream", or are "fp32" and widen what
            they rotate (CodeGen), which may be cast back: "fp32_narrowed" (OLMo).
        wide_softmax: eager code asks for a softmax in fp32.
        names_parts: rotated and unrotated parts of the heads have names of their own until the
            attention returns (StableLM, Phi, GPT-J).
        returns_probabilities: eager attention's are given to the layer, whose code names them.
        keeps_probabilities: it does until it returns, whatever else attends after it (LongT5).
        always_masked: the model makes a mask whatever the batch, with ALiBi one per head (Falcon).
        keeps_keys: later layers read its keys and values.
        skips_prompt: it borrows keys, and reads the last position of a prompt alone (Gemma 4).
        packed: images stand in one row, and SDPA is called for each of them (Qwen2-VL).
        segment: patches that one call of SDPA reads at most, where windows are packed, too; 0: all
            of an image.
        adds_mask: SDPA gets one mask for all layers that is added to the scores as it is: in the
            dtype of the "stream" (Pixtral), of the "weights", or of a "product" of matrices, which
            autocast narrows (Llama 3.2 Vision); "" for none.
        ring: ranks whose keys and values its queries see; 1: those of this one.
        windows: its scores are products of chunks (LED); `sliding_window` is a mask's.
        sparse: it sees few of the keys, and masks the others (DeepSeek V3.2).
        cut_from: what cross attention reads is cut from sequences that were padded to a multiple of
            so many tokens; 0: it is all of them.
    """

    kind: Literal["softmax", "linear", "mamba1", "mamba2", "conv"] = "softmax"
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...] = ()
    position: Literal["rope", "alibi", "relative", "none"] = "rope"
    rotary_dim: int = 0
    sliding_window: int | None = None
    softcap: float | None = None
    causal: bool = True
    cross: bool = False
    memory_len: int = 0
    cache_elements: int = 0
    state_elements: int = 0
    recurrent_elements: int = 0
    conv_kernel: int = 0
    recurrent_dtype: str = ""
    chunk_size: int = 64
    in_blocks: bool = False
    summed_tokens: int = 0
    masks_keys: bool = False
    masks_keys_until: str = ""
    other_params: int = 0
    dropout: float = 0.0
    sdpa: Literal["fused", "math", "eager"] = "fused"
    flash: bool = True
    projection: Projection = "plain"
    eager: EagerScores = "scaled"
    rotated_parts: int = 1
    joins_rotation: bool = False
    biases_each_layer: bool = False
    biases_each_sequence: bool = False
    relative_rows: int = 0
    wide_rotation: WideRotation = ""
    tables: PositionTables = "stream"
    wide_softmax: bool = True
    names_parts: bool = False
    returns_probabilities: bool = True
    keeps_probabilities: bool = False
    always_masked: bool = False
    keeps_keys: bool = False
    skips_prompt: bool = False
    out_norm: Norm | None = None
    has_temperature: bool = False
    packed: bool = False
    segment: int = 0
    adds_mask: AddedMask = ""
    ring: int = 1
    windows: Windows | None = None
    sparse: SparseKeys | None = None
    cut_from: int = 0

    def __post_init__(self) -> None:
        if self.kind != "softmax":
            return
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}: is {getattr(self, name)}, must be 1 or more; correct the sizes of "
                    "the model's config"
                )

    @property
    def conv_channels(self) -> int:
        """Those of its short convolution; 0 without one."""
        return self.state_elements // self.conv_kernel if self.conv_kernel else 0

    @property
    def q_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def k_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def v_width(self) -> int:
        return self.num_key_value_heads * self.v_head_dim

    @property
    def out_width(self) -> int:
        return self.num_attention_heads * self.v_head_dim

    @property
    def num_params(self) -> int:
        return (
            sum(linear.num_params for linear in self.linears)
            + sum(norm.num_params for norm in self.norms)
            + (self.out_norm.num_params if self.out_norm else 0)
            + (self.sparse.num_params if self.sparse else 0)
            + self.other_params
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A feed-forward block; `gated` has two input projections whose product is projected back.

    `width` is what one token passes through (one expert's width; experts are counted by
    `Moe`). `activation` is the Hugging Face name (silu, gelu, gelu_new, relu, …). `dropout`
    says that training drops values between the activation and the last projection, `is_scaled`
    that gate and result are multiplied by numbers (Falcon-H1). `norms` are over what the last
    projection reads (BitNet). `is_inline`: lines of the layer's own forward, where one variable
    names its input and then what the activation returns (Whisper). `names_steps`: variables
    name both factors and what the activation read until it returns (Gemma 3n). `is_sparse`: what
    the gate returns is less a cutoff of each token, and 0 below it.
    """

    width: int
    gated: bool
    activation: str
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...] = ()
    dropout: bool = False
    is_scaled: bool = False
    is_inline: bool = False
    names_steps: bool = False
    is_sparse: bool = False

    @property
    def num_params(self) -> int:
        return sum(linear.num_params for linear in self.linears) + sum(
            norm.num_params for norm in self.norms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts: `expert.linears` carry `count` = experts and `active` = top k.

    Args:
        routing: how the router's product becomes weights of the chosen experts: "softmax" over
            all, narrowed to the dtype of the product (Qwen) or left in fp32 ("softmax_wide",
            Mixtral); a product in fp32 before it ("softmax_fp32", DeepSeek V2; "sigmoid",
            DeepSeek V3), autocast switched off for it and weights narrowed ("softmax_exact",
            ERNIE), or only weights narrowed to the dtype of the input ("softmax_as_input", Jamba);
            "sigmoid_divided" is DeepSeek V3's, divided by the sum in a new tensor, which
            autocast widens (Hunyuan 3); a sigmoid without that, in fp32 ("sigmoid_wide", MiniMax
            M2) or in the dtype of the product ("sigmoid_narrow", LFM2); softmax over the "chosen"
            ones (gpt-oss, Granite); "sparse_mixer" (Phi); "scaled", of normalised inputs and with a
            weight of each expert (Gemma 4); the "largest" of a softmax of a router in fp32 (Switch
            Transformers). None where nobody has written it down.
        shared_first: the shared expert runs before the router.
        clamped: the gate is gpt-oss's, of single operators.
        one_by_one: the experts run in a Python loop, not in grouped products.
        capacity: tokens of a sequence that an expert takes, the others pass it by; 0: all.
        jitters: training multiplies what the router reads by noise.
        latent: projections before and after the routed experts, which work on fewer elements
            (Nemotron-H).
        norm: over the sum of routed and shared experts (A.X K1).
        sums_wide: that sum is made in fp32 (Hunyuan 3).
        by_score: every expert runs on every token, whose input is multiplied by the expert's score
            (Llama 4).
    """

    num_experts: int
    experts_per_token: int
    expert: Mlp
    router: Linear
    shared: Mlp | None = None
    other_params: int = 0
    routing: Routing | None = None
    shared_first: bool = False
    clamped: bool = False
    one_by_one: bool = False
    capacity: int = 0
    jitters: bool = False
    by_score: bool = False
    latent: tuple[Linear, ...] = ()
    norm: Norm | None = None
    sums_wide: bool = False

    @property
    def rows_per_token(self) -> int:
        """Experts that compute something for a token."""
        return self.num_experts if self.by_score else self.experts_per_token

    @property
    def num_params(self) -> int:
        shared = self.shared.num_params if self.shared else 0
        shared += self.norm.num_params if self.norm else 0
        around = self.router.num_params + sum(linear.num_params for linear in self.latent)
        return self.expert.num_params + around + shared + self.other_params


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """A second embedding of each token, of which every layer reads a part of its own (Gemma 4).

    Args:
        num_parts: layers whose parts stand side by side in one tensor.
        gate, projection: before and after the product with this layer's part.
        norm: over what is added to the hidden state.
    """

    num_parts: int
    gate: Linear
    projection: Linear
    activation: str
    norm: Norm

    @property
    def packed_width(self) -> int:
        return self.num_parts * self.gate.out_features


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """How a block reads a stream of several hidden states and writes it: alternating updates.

    All states are predicted as sums of all. Attention and MLP read the first of them; what they
    make corrects every state. Coefficients of both are products of what a router says.

    Args:
        num_states: hidden states side by side.
        router, norm: of the first state before the block, and of what the block has made.
        prediction, correction: matrices from the router's result to the coefficients.
        scales: the first state is multiplied by a parameter before the layer's own input.

    Source: Baykal et al. 2023, arXiv:2301.13310; transformers 5.23 `Gemma3nTextAltUp`.
    """

    num_states: int
    router: Linear
    norm: Norm
    prediction: Linear
    correction: Linear
    scales: bool = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.router, self.prediction, self.correction

    @property
    def num_params(self) -> int:
        in_linears = sum(linear.num_params for linear in self.linears)
        return in_linears + self.norm.num_params + self.norm.width  # a scale, used or not


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankResidual:
    """What a block adds to its attention: its normalised input, and a low-rank product of it.

    Args:
        down, up: the two factors.
        norm: over their product.

    Source: Menghani et al. 2024, arXiv:2411.07501 (LAuReL); transformers 5.23
    `Gemma3nTextLaurelBlock`.
    """

    down: Linear
    up: Linear
    norm: Norm

    @property
    def num_params(self) -> int:
        return self.down.num_params + self.up.num_params + self.norm.num_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer block.

    Args:
        moe: in the place of `mlp`, or beside it (Gemma 4).
        norms: those over the hidden state, in forward order.
        parallel: attention and MLP read the layer's input, each through a norm or one for both.
        post_norm: no norm reads the layer's input (BERT, OLMo 2).
        dropouts: widths of the tensors that training drops values of, outside the MLP.
        drops_mlp: what the MLP returns is dropped, too, where there are `dropouts`.
        copies_gradients: the stream's gradient is laid out otherwise than what is added to it, so
            that each sum copies it on its way back (Qwen2-Audio).
        names_attention: the block's code holds what attention returned until its end (GPT-2).
        names_norm: so what the first norm returned (StableLM).
        returns_probabilities: eager attention's are part of what the block returns, which the
            model's loop names until the next block has returned (GPT-J, BLOOM).
        scales_result: the result is multiplied by a number, in place (Gemma 4).
        scales_sums: so is what is added to the hidden state, before it is (Granite);
            scales_channels: each of its channels by a parameter of its own (InternViT).
        gates_sums: so it is by the hyperbolic tangent of a parameter of one number, and
            masks_fed: what the MLP returns, by a number for each token (Llama 3.2 Vision).
        side_by_side: all `attentions` read what the first norm returns, and what they return is
            added up (Falcon-H1).
        wide_residual: the hidden state is fp32 whatever the model is; norms read it in the dtype of
            the weights (Mamba 2).
        altup: its stream has several hidden states (Gemma 3n).
        low_rank: beside its attention, of the same normalised input.
        own_len: tokens of each sequence that it runs on, whatever the length of the run's; 0: as
            many. Of an encoder, where its decoder has another length (`with_source_len`).
    """

    attentions: tuple[Attention, ...]
    mlp: Mlp | None = None
    moe: Moe | None = None
    norms: tuple[Norm, ...] = ()
    parallel: bool = False
    post_norm: bool = False
    dropouts: tuple[int, ...] = ()
    drops_mlp: bool = True
    copies_gradients: bool = False
    names_attention: bool = False
    names_norm: bool = False
    returns_probabilities: bool = False
    layer_input: LayerInput | None = None
    scales_result: bool = False
    scales_sums: bool = False
    scales_channels: bool = False
    gates_sums: bool = False
    masks_fed: bool = False
    side_by_side: bool = False
    wide_residual: bool = False
    altup: AltUp | None = None
    low_rank: LowRankResidual | None = None
    other_params: int = 0
    own_len: int = 0

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer, in forward order."""
        linears = [linear for attention in self.attentions for linear in attention.linears]
        if self.mlp is not None:
            linears.extend(self.mlp.linears)
        if self.moe is not None:
            linears.append(self.moe.router)
            linears.extend(self.moe.latent)
            linears.extend(self.moe.expert.linears)
            if self.moe.shared is not None:
                linears.extend(self.moe.shared.linears)
        if self.layer_input is not None:
            linears += [self.layer_input.gate, self.layer_input.projection]
        linears += () if self.altup is None else self.altup.linears
        if self.low_rank is not None:
            linears += [self.low_rank.down, self.low_rank.up]
        return tuple(linears)

    @property
    def inner_norms(self) -> tuple[Norm, ...]:
        """Norms beside `norms`: of its attentions, MLP or experts, and of its input of its own."""
        norms = [norm for attention in self.attentions for norm in attention.norms]
        norms += [attention.out_norm for attention in self.attentions if attention.out_norm]
        sparse = (each.sparse for each in self.attentions)
        norms += [each.norm for each in sparse if each is not None and each.norm is not None]
        norms += () if self.mlp is None else self.mlp.norms
        norms += () if self.moe is None or self.moe.norm is None else (self.moe.norm,)
        if self.layer_input is not None:
            norms.append(self.layer_input.norm)
        norms += () if self.altup is None else (self.altup.norm,)
        norms += () if self.low_rank is None else (self.low_rank.norm,)
        return tuple(norms)

    @property
    def num_params(self) -> int:
        extra = self.layer_input
        return (
            sum(attention.num_params for attention in self.attentions)
            + (self.mlp.num_params if self.mlp else 0)
            + (self.moe.num_params if self.moe else 0)
            + sum(norm.num_params for norm in self.norms)
            + (extra.gate.num_params + extra.projection.num_params if extra else 0)
            + (extra.norm.num_params if extra else 0)
            + (self.altup.num_params if self.altup else 0)
            + (self.low_rank.num_params if self.low_rank else 0)
            + self.other_params
        )

    @property
    def trained_params(self) -> int:
        """Those that get a gradient where all weights are trained."""
        idle = sum(each.num_params for each in self.linears if not each.active)
        idle += sum(each.sparse.num_params for each in self.attentions if each.sparse)
        return self.num_params - idle

    @property
    def running(self) -> Layer:
        """The layer without matrices that no token passes."""
        if all(linear.active for linear in self.linears):
            return self
        attentions = (
            replace(each, linears=tuple(linear for linear in each.linears if linear.active))
            for each in self.attentions
        )
        return replace(self, attentions=tuple(attentions))

    def with_attentions(self, change: Callable[[Attention], Attention]) -> Layer:
        """The layer with each of its attentions changed."""
        return replace(self, attentions=tuple(map(change, self.attentions)))

    @property
    def windows(self) -> Windows | None:
        return next((each.windows for each in self.attentions if each.windows), None)

    @property
    def has_own_tokens(self) -> bool:
        """Whether it runs on other tokens than those of the run: padded ones, or an encoder's."""
        return bool(self.own_len) or self.windows is not None

    def padded(self, tokens: Count, span: Count) -> tuple[Count, Count]:
        """How many tokens it runs on, and how many of each sequence. Kind: exact.

        Source: transformers 5.23 `LEDEncoder._pad_to_window_size`; `own_len`.
        """
        if self.own_len:
            tokens, span = floor_div(tokens, span) * self.own_len, self.own_len
        if self.windows is None:
            return tokens, span
        length = ceil_div(span, self.windows.padded_to) * self.windows.padded_to
        return floor_div(tokens, span) * length, length


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """`count` equal layers of one stack; `shared` when they are one set of weights (ALBERT).

    Args:
        positions: where in the stack they stand; empty where nobody said.
    """

    layer: Layer
    count: int
    positions: tuple[int, ...] = ()
    stack: Literal["decoder", "encoder"] = "decoder"
    shared: bool = False

    @property
    def num_params(self) -> int:
        return self.layer.num_params * (1 if self.shared else self.count)
