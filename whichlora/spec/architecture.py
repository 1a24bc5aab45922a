"""What a transformer is made of, as far as bytes, work and adapters depend on it.

A family (`whichlora.families`) turns a Hugging Face `config.json` into these values; every
formula reads only them, so a new architecture is one new file that describes its blocks.
Shapes are per token. All values are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from whichlora.errors import ConfigError
from whichlora.spec.numeric import Count, ceil_div, floor_div, is_plain, smallest

SAMPLING_RATE = 16_000  # samples of sound a second, as every processor here takes them
UNTIL_TODAY = "999"  # a release that is newer than all
Task = Literal["causal-lm", "seq2seq-lm", "encoder"]
Pooling = Literal["mean", "cls", "lasttoken"]
NormKind = Literal[
    "rms",
    "rms_offset",
    "rms_wide",
    "rms_power",
    "rms_mixed",
    "layer",
    "layer_steps",
    "layer_narrow",
]
PositionKind = Literal["learned", "frozen", "buffer"]
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
EagerScores = Literal["scaled", "scaled_queries", "beside_sum", "named", "fp32", "sinks"]
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
            (Gemma), "rms_power" as "rms_wide", its deviation being a power (Gemma 4); "layer" is
            `nn.LayerNorm`; "rms_mixed" multiplies the 16-bit input by the fp32 deviation (T5);
            "layer_steps" is LayerNorm written out in fp32 operators (Cohere); "layer_narrow" is
            LayerNorm that follows autocast's dtype (Nemotron).
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
            one key head); "latent" from low-rank latents, whose rotation is written in single
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
            "scaled_queries" (MVP); "beside_sum", which live beside their sum with the mask until
            the softmax is done (Falcon); "named", one fused product whose operands the class names
            until it returns (BLOOM); of queries and keys in "fp32" (GPT-J, GPT-Neo); with "sinks",
            one more logit for each head, which no value belongs to (gpt-oss).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A lookup table of `rows` vectors of `width` elements.

    Args:
        kind: "learned", a "frozen" parameter that never gets a gradient, or no parameter but a
            "buffer" (the sines of Pegasus and of M2M100).
        per_sequence: looked up for every sequence, not once for the whole batch.
    """

    name: str
    rows: int
    width: int
    kind: PositionKind = "learned"
    per_sequence: bool = True

    @property
    def num_elements(self) -> int:
        return self.rows * self.width

    @property
    def num_params(self) -> int:
        return 0 if self.kind == "buffer" else self.num_elements

    @property
    def trains(self) -> bool:
        """Whether full fine-tuning changes it."""
        return self.kind == "learned"

    @property
    def has_positions(self) -> bool:
        """Whether it is looked up by position: its name in transformers says so."""
        return "position" in self.name or self.name == "wpe"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedHead:
    """What an encoder gains when it is loaded to fill masked words.

    Args:
        width: of what the projection to the words reads.
        linear, activation, norm: the transform before it, in forward order; None where it reads
            the last hidden states themselves (EuroBERT).
        tied: the projection is the token embedding.
        lost_params: those of `AutoModel` that a model with this head lacks: its pooler.
        bias: one value per word.
        widens_logits: the loss casts the logits to fp32 by itself.
    """

    width: int
    linear: Linear | None = None
    activation: str = ""
    norm: Norm | None = None
    tied: bool = True
    lost_params: int = 0
    bias: bool = True
    widens_logits: bool = False


class ImageGrid(NamedTuple):
    """One image as its processor cuts it.

    Args:
        crops: parts that pass the tower by themselves.
        patches: of one crop.
        tokens: vectors of the whole image that the language model reads.
        pixels: shape of its `pixel_values`.
        sides: rows and columns that the processor tells the model: of patches, or of pixels.
        markers: tokens of text that the processor writes into it.
        projected: vectors of it before some are left out or added; 0: as many as `tokens`.
        masked: numbers of int64 beside the pixels: of a mask, or of the places of patches; 0: none.
        padding: patches among `patches` that are none, and are masked.
        attended: vectors of it that stand in no row of the text, which attends to them.
    """

    crops: int
    patches: int
    tokens: int
    pixels: tuple[int, ...]
    sides: tuple[int, int] = (0, 0)
    markers: int = 0
    projected: int = 0
    masked: int = 0
    padding: int = 0
    attended: int = 0

    @property
    def vectors(self) -> int:
        """Of the whole image that the language model reads, in rows of the text or beside them."""
        return self.attended or self.tokens

    @property
    def num_pixels(self) -> int:
        """Numbers in `pixel_values`."""
        return math.prod(self.pixels)


@dataclass(frozen=True, slots=True)
class LimitedGrid:
    """The rule `grid` of a processor that sees larger images shrunk to `max_pixels`."""

    grid: Callable[[int, int], ImageGrid]
    max_pixels: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        return self.grid(*limited_sides(height, width, self.max_pixels))


def limited_sides(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Sides of an image that is shrunk to `max_pixels` where it has more.

    Kind: exact. Source: LLaMA-Factory 0.9.5 `MMPluginMixin._preprocess_image`.
    """
    if height * width <= max_pixels:
        return height, width
    factor = math.sqrt(max_pixels / (height * width))
    return max(1, int(height * factor)), max(1, int(width * factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """What turns the images of a prompt into vectors of the language model.

    Args:
        stack: its blocks; `head_linears` are the matrices around them, `other_params` what else is
            there: kernels, norms and tables outside of the blocks.
        grid: height and width of an image in pixels -> how its processor cuts it.
        fields: what the processor adds to a batch.
        projector: name of the code after the last block (`symbolic.projectors`).
        table_bytes: cosines and sines of one patch, which all blocks read; `table_width`: elements
            of them that are in the dtype of the stream.
        idle: matrices that no image passes (Gemma 4's audio), or of a block whose result nobody
            reads (LLaVA), which `runs_idle`.
        idle_params: all parameters of these blocks, and what else gets no gradient.
        kernel: the convolution that embeds patches, where its module shares a name with a matrix:
            PEFT adapts it wherever targets are names.
        trained: full fine-tuning changes it.
        hooked_weights: those that embed what the hook is behind.
        hooked: checkpointing makes the embedded patches need a gradient, whatever is frozen.
        merge: patches of one vector that the language model reads.
        num_returned: states of blocks that the caller holds while the text is read.
        copies: copies of the projected vectors that the caller holds meanwhile.
        deep: further projectors, which read what blocks in between return (Qwen3-VL).
        embedded: elements of a patch that are there while it is embedded, in the dtype of the
            weights and in fp32.
        positions: elements of a patch in fp32 that a local variable holds to the end: its position,
            looked up (Qwen3-VL).
        joined: images stand in one row that a mask divides.
        holds_narrow: a caller of the tower holds the pixels in its dtype while it runs.
        joins_pixels: so it does of a copy of them in fp32 (LLaVA-NeXT).
        copies_pixels: they are copied even where the dtype is the same, and their mask (SmolVLM).
        num_embedded: tensors of embedded patches that the tower's forward names while the blocks
            run, beside the input of the one that does.
        normalises: a LayerNorm stands before what the tower returns.
        masks_text: images make a mask of the text, which attends to each as a whole (Gemma 3), or
            of its layers with a window (Gemma 4).
        stacks_rows: `pixel_values` has a dimension of rows before that of images.
        attended: its vectors stand in no row of the text, which attends to them.
        window_s: seconds of a clip of sound that the processor keeps; 0: it reads images.
        embedding_saved: elements of a patch that its embedding keeps for its backward.
        embedding_weights: weights that embed a patch, where kernels overlap; 0: every number of it
            is read once.
        unfolds: patches are rows of pixels, and the first of `head_linears` embeds them (Llama 4).
        pixel_bytes: of one number in `pixel_values`, whatever the model computes in.
        returned_width: elements of each vector as the tower returns it to a caller who projects it,
            and holds both (Llama 4); all vectors, behind a LayerNorm, where it `returns_normed`
            (Qwen2-Audio).
        embeds_first: `generate` looks up the text before it, for which it has no function.
        holds_mask: its caller names the mask of padded patches while the text is read.
        rescales_pixels: pixels are shifted and scaled in fp32 before they are embedded, and stay so
            where the embedding is quantised: with it all of the tower's stream (Gemma 4).
        names_embedded: the tower's forward names the embedded patches until it returns.
        strips: vectors of padding are left out before the last matrix.
        checkpointed: checkpointing makes its blocks again in the backward, as it does layers.
        names_blocks: the tower's forward names what all of its blocks returned, and their mask,
            until it returns; num_joined: how many of these states are joined with the last one.
        inner_norms: between blocks.
        named_elements: of an image that it names so long: of its patches without what is added.
        table_saved: of an image that looked-up positions have, which trained gates multiply.
        wraps: names of modules around its matrices, which PEFT takes for targets and refuses.
        fused_head: TRL's fused head finds the last states of the model's class: its `base_model`
            ends in them (not Llama 4's, which ends in logits), and has no decoder of its own.
    """

    stack: ModelSpec
    grid: Callable[[int, int], ImageGrid]
    fields: tuple[str, ...]
    projector: str
    merge: int
    table_bytes: int = 0
    table_width: int = 0
    idle: tuple[Linear, ...] = ()
    idle_params: int = 0
    kernel: Linear | None = None
    runs_idle: bool = False
    trained: bool = True
    hooked: bool = True
    hooked_weights: int = 0
    num_returned: int = 1
    copies: int = 1
    deep: int = 0
    embedded: tuple[int, int] = (0, 0)
    positions: int = 0
    joined: bool = False
    holds_narrow: bool = True
    joins_pixels: bool = False
    copies_pixels: bool = False
    num_embedded: int = 1
    normalises: bool = False
    masks_text: Literal["", "all", "windows"] = ""
    stacks_rows: bool = False
    attended: bool = False
    window_s: float = 0.0
    embedding_saved: int = 0
    embedding_weights: int = 0
    unfolds: bool = False
    pixel_bytes: int = 4
    returned_width: int = 0
    returns_normed: bool = False
    holds_mask: bool = False
    embeds_first: bool = False
    rescales_pixels: bool = False
    names_embedded: bool = False
    strips: bool = False
    checkpointed: bool = True
    names_blocks: bool = False
    num_joined: int = 0
    inner_norms: tuple[Norm, ...] = ()
    named_elements: int = 0
    table_saved: int = 0
    wraps: tuple[str, ...] = ()
    fused_head: bool = True

    @property
    def hears(self) -> bool:
        """Whether it reads clips of sound, not images."""
        return self.window_s > 0

    @property
    def transcribes(self) -> bool:
        """Whether a decoder attends to one clip of sound for each row of tokens (Whisper)."""
        return self.attended and self.hears

    @property
    def reads(self) -> str:
        """What it reads, as moments are named by it."""
        return "audio" if self.hears else "images"

    def inputs(self, images: int, audios: int) -> int:
        """How many it reads of each row, which has so many images and clips."""
        if self.transcribes:
            return 1
        return audios if self.hears else images

    def limited(self, max_pixels: int | None) -> Callable[[int, int], ImageGrid]:
        """`grid` for images that are shrunk to `max_pixels` before, if there is such a limit."""
        return self.grid if max_pixels is None else LimitedGrid(self.grid, max_pixels)

    @property
    def embedder(self) -> Linear | None:
        """The matrix that embeds patches, where it is one that takes an adapter."""
        return self.stack.head_linears[0] if self.unfolds else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix that learns, with the number of all such in the tower."""
        in_blocks = (
            replace(linear, count=linear.count * group.count)
            for group in self.stack.groups
            for linear in group.layer.linears
        )
        every = (*in_blocks, *self.stack.head_linears)
        return tuple(linear for linear in every if linear.is_module)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTransform:
    """A matrix before the projection to labels, and what follows it.

    Args:
        in_model: it is the pooler of `AutoModel`, among whose parameters it is (BERT).
        in_head: PEFT copies it with the projection: both are in one module (RoBERTa), or its name
            ends like that of the projection (DistilBERT).
    """

    linear: Linear
    activation: str
    norm: Norm | None = None
    in_model: bool = False
    in_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelHead:
    """What a class for labels has after the last layer, in place of a vocabulary's head.

    Args:
        projection: from the hidden states to the labels.
        pools: whether one position of each sequence is taken, before the projection or of its
            results, or never.
        averages: what is taken "before" is the mean of all positions, weighted by the mask.
        drops: training drops values of what every position projects.
        widens_logits: the loss casts them to fp32 itself.
        copied: PEFT trains a copy of the projection with the task's type.
        lost_params: those of `AutoModel` that the class lacks: its pooler.
    """

    projection: Linear
    pools: Literal["never", "before", "after"]
    transform: LabelTransform | None = None
    averages: bool = False
    drops: bool = False
    widens_logits: bool = False
    copied: bool = True
    lost_params: int = 0

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its matrices in forward order."""
        before = () if self.transform is None else (self.transform.linear,)
        return (*before, self.projection)

    @property
    def num_params(self) -> int:
        """What a model gains by it, less what it loses. Kind: exact."""
        transform, added = self.transform, self.projection.num_params - self.lost_params
        if transform is not None:
            added += transform.linear.num_params * (not transform.in_model)
            added += 0 if transform.norm is None else transform.norm.num_params
        return added


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """A stream of several hidden states: the embeddings, and a projection of them for each further.

    Args:
        expanding: those projections, before the first layer.
        merging: so after the last, before the mean of all states.
    """

    expanding: tuple[Linear, ...]
    merging: tuple[Linear, ...]

    @property
    def num_states(self) -> int:
        return 1 + len(self.expanding)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.expanding + self.merging


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One architecture, with every size that memory and time depend on.

    Args:
        name: hub id, or the local path it was read from.
        head: the projection to the vocabulary; None for an encoder without one.
        head_tied: the head shares its weight with the token embedding.
        head_linears: projections around the stack (OPT-350M's project_in and project_out), and
            the one that makes the inputs of each layer, which `layer_input_norm` reads (Gemma 4).
        streams: what makes several hidden states of one, and one of them (Gemma 3n).
        idle_linears: matrices of a tower that no text passes, loaded and quantised as others are;
            their parameters are among `other_params`.
        rotates_each_kind: sliding and full layers have tables of cosines and sines of their own.
        masked_head: of an encoder; not among its parameters, which are those of `AutoModel`.
        label_heads: those of its classes for labels by the name of a task, with one label.
        label_head: the one of them that it is loaded with, in place of the vocabulary's.
        pooling: how its last hidden states become the embedding of a text, in place of any head.
        rotary_tables_before: release of transformers up to which each attention keeps cosines and
            sines of every position.
        splits_embeddings: each of two stacks has a table of tokens of its own (T5Gemma).
        embeds_in_steps: looked-up rows are multiplied by something before they are the stream.
        widens_logits: the loss of an encoder-decoder casts its logits to fp32 itself (T5Gemma).
        scores_prompt: `generate` gets logits of every token of a prompt, as they are.
        narrow_loss_before: release of transformers up to which the class computes its own loss, of
            shifted logits that it does not widen (GPT-BigCode); empty where none does.
        caches_checkpointed_before: release up to which the class caches keys and values in training
            with checkpointing, too.
        caches_in_training: its text has a config of its own, which still says `use_cache` where the
            Trainer has set the model's to False.
        hands_on_use_cache: both stacks are told the model's `use_cache`, which the Trainer sets to
            False, so that no decoder caches while it trains (LongT5).
        supports_checkpointing: the class has gradient checkpointing; the Trainer refuses one that
            has not.
        scales_logits: the model multiplies its logits by a number (Cohere, Granite).
        returns_wide_logits: it casts them to fp32 itself (Mamba 2).
        scales_head_input: so what the head reads (MiniCPM3).
        biases_logits: it adds a buffer to them (BART).
        other_params: parameters outside all of the above (a vision tower, a pooler).
        idle_params: those among them that no text passes: fully trained, they get no gradient and
            the optimizer keeps no states of them.
        skips_layers: whole layers are among them, which rows without images skip (Llama 3.2
            Vision).
        for_images: the model as rows with images pass it, where it has other layers then.
        unloaded_params: those among them that `AutoModelForCausalLM` leaves on the disk.
        tower: what turns images into vectors, where the family describes its blocks.
        started_tower: so it does for an engine that starts with it, whose requests are texts.
        buffer_bytes: what modules keep beside parameters (a causal mask per attention).
        positions_of_padding: first rows of its table of positions, which no token looks up.
        max_position_embeddings: of two stacks, positions that both have; max_prompt_positions:
            those of an encoder that has more (LED).
        shapes_of: the model whose config this is, where it is another's; it may state more
            positions, or fewer.
        file_type: of the GGUF file that its name means, where it is a tag of Ollama's library.
        embedding_dropouts, final_dropouts: widths of the tensors that training drops values of
            before the first and after the last layer.
        notes: what a reader must know: text tower only, approximated blocks, and so on.
        config: the Hugging Face config, verbatim.
    """

    name: str
    model_type: str
    task: Task
    hidden_size: int
    vocab_size: int
    groups: tuple[LayerGroup, ...]
    embeddings: tuple[Embedding, ...]
    embedding_norms: tuple[Norm, ...] = ()
    final_norms: tuple[Norm, ...] = ()
    layer_input_norm: Norm | None = None
    head: Linear | None = None
    head_tied: bool = False
    head_linears: tuple[Linear, ...] = ()
    streams: Streams | None = None
    idle_linears: tuple[Linear, ...] = ()
    masked_head: MaskedHead | None = None
    label_heads: tuple[tuple[str, LabelHead], ...] = ()
    label_head: LabelHead | None = None
    pooling: Pooling | None = None
    logit_softcap: float | None = None
    scales_logits: bool = False
    returns_wide_logits: bool = False
    scales_head_input: bool = False
    biases_logits: bool = False
    rotates_each_kind: bool = False
    rotary_tables_before: str = "4.42"
    splits_embeddings: bool = False
    embeds_in_steps: bool = False
    widens_logits: bool = False
    narrow_loss_before: str = ""
    scores_prompt: bool = False
    caches_checkpointed_before: str = ""
    caches_in_training: bool = False
    hands_on_use_cache: bool = False
    supports_checkpointing: bool = True
    other_params: int = 0
    idle_params: int = 0
    skips_layers: bool = False
    for_images: ModelSpec | None = None
    unloaded_params: int = 0
    tower: Tower | None = None
    started_tower: Tower | None = None
    buffer_bytes: int = 0
    embedding_dropouts: tuple[int, ...] = ()
    final_dropouts: tuple[int, ...] = ()
    max_position_embeddings: int | None = None
    max_prompt_positions: int | None = None
    positions_of_padding: int = 0
    shapes_of: str = ""
    file_type: str = ""
    dtype: str = "bfloat16"
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __hash__(self) -> int:
        """Of what tells most models apart: caches ask for it far too often to visit every layer."""
        return hash((self.name, self.task, self.hidden_size, self.num_hidden_layers))

    @property
    def num_hidden_layers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(group.layer.moe is not None for group in self.groups)

    @property
    def chooses_keys(self) -> bool:
        """Whether queries see few of the keys, which an indexer chooses."""
        attentions = (each for layer, _ in self.layers() for each in layer.attentions)
        return any(attention.sparse is not None for attention in attentions)

    @property
    def can_generate(self) -> bool:
        """Whether it writes texts; an encoder or a model of labels reads them in one forward."""
        return self.task != "encoder" and self.label_head is None and self.pooling is None

    @property
    def stream_width(self) -> int:
        """Elements of a token that a layer reads and returns."""
        return self.hidden_size * (1 if self.streams is None else self.streams.num_states)

    @property
    def around_linears(self) -> tuple[Linear, ...]:
        """Matrices before the first and after the last layer, without any head."""
        return self.head_linears + (() if self.streams is None else self.streams.linears)

    @property
    def outer_linears(self) -> tuple[Linear, ...]:
        """Matrices outside of the layers that can take an adapter."""
        if self.label_head is not None:
            return self.around_linears + self.label_head.linears
        transform = None if self.masked_head is None else self.masked_head.linear
        return self.around_linears + (() if transform is None else (transform,))

    @property
    def num_params(self) -> int:
        """Parameters, each tied tensor once. Kind: exact."""
        head = 0
        if self.head is not None:
            head = self.head.num_params
            if self.head_tied:
                head -= self.head.num_weights
        return (
            sum(group.num_params for group in self.groups)
            + sum(embedding.num_params for embedding in self.embeddings)
            + sum(norm.num_params for norm in self.embedding_norms + self.final_norms)
            + (self.layer_input_norm.num_params if self.layer_input_norm else 0)
            + sum(linear.num_params for linear in self.around_linears)
            + head
            + (self.label_head.num_params if self.label_head else 0)
            + self.other_params
        )

    @property
    def loaded_params(self) -> int:
        """Parameters that are on the device. Kind: exact."""
        return self.num_params - self.unloaded_params

    @property
    def trainable_params(self) -> int:
        """Those among them that full fine-tuning on text changes. Kind: exact."""
        frozen = sum(embedding.num_params for embedding in self.embeddings if not embedding.trains)
        in_layers = sum(
            group.num_params - group.layer.trained_params * (1 if group.shared else group.count)
            for group in self.groups
        )
        return self.loaded_params - frozen - in_layers - self.idle_params

    @property
    def continues(self) -> bool:
        """Whether it is a later part of a model: its first layer reads what another GPU returns."""
        return not any(table.rows for table in self.embeddings)

    @property
    def starts_in_layer_norm(self) -> bool:
        """Whether a LayerNorm stands before the first layer; autocast widens what it returns."""
        return any(norm.kind == "layer" for norm in self.embedding_norms)

    @property
    def adds_positions(self) -> bool:
        """Whether looked-up positions are added to the looked-up tokens."""
        return any(table.has_positions for table in self.embeddings)

    @property
    def has_two_stacks(self) -> bool:
        """Whether it is an encoder and its decoder, both of texts."""
        return len({group.stack for group in self.groups}) > 1

    def target_len(self, run_len: int | None, source_len: Count) -> Count | None:
        """Tokens that its decoder writes where its encoder reads `source_len`; None: as many.

        They are those that the run asks for, or no more than the decoder has positions for.

        Kind: exact. Source: `run_len` is `RunConfig.target_len`; transformers 5.23
        `LEDDecoder.__init__`: `max_decoder_position_embeddings`.
        """
        if run_len is not None or self.max_prompt_positions is None or not self.has_two_stacks:
            return run_len
        assert self.max_position_embeddings is not None
        most = smallest(source_len, self.max_position_embeddings)
        is_same = most == source_len
        return None if (is_same if is_plain(source_len) else is_same.all()) else most

    @property
    def longest_input(self) -> int | None:
        """Tokens that its table of positions has vectors for; None where they are computed."""
        looked_up = any(table.has_positions and table.kind != "buffer" for table in self.embeddings)
        if not looked_up or self.max_position_embeddings is None:
            return None
        return self.max_position_embeddings - self.positions_of_padding

    @property
    def longest_row(self) -> int | None:
        """So of a row that it trains on, which an encoder reads; None where any length is read."""
        longest = self.longest_input
        return self.max_prompt_positions or longest if self.has_two_stacks else longest

    def cut_target(self, run_len: int | None, source_len: int) -> int:
        """Tokens that targets of its data are cut to; 0 where it has no decoder of its own.

        Args: as of `target_len`.
        """
        asked = run_len or source_len
        return min(asked, self.longest_input or asked) if self.has_two_stacks else 0

    def layers(self) -> Iterator[tuple[Layer, int]]:
        """Each distinct layer with the number of times the forward runs it."""
        return ((group.layer, group.count) for group in self.groups)

    def with_layers(self, change: Callable[[Layer], Layer]) -> ModelSpec:
        """The model with each of its distinct layers changed; they stand where they stood."""
        groups = tuple(replace(group, layer=change(group.layer)) for group in self.groups)
        return replace(self, groups=groups)

    def with_attentions(self, change: Callable[[Attention], Attention]) -> ModelSpec:
        """The model with each attention of its layers changed."""
        return self.with_layers(lambda layer: layer.with_attentions(change))


@lru_cache(maxsize=64)
def with_source_len(model: ModelSpec, source_len: int) -> ModelSpec:
    """`model` whose encoder reads so many tokens of each sequence, whatever its decoder writes.

    Layers of the encoder run on them, and cross attention reads as many positions. Kind: exact.
    Source: transformers 5.23 `T5ForConditionalGeneration.forward`: `input_ids` and `labels` have
    lengths of their own.
    """
    groups = []
    for group in model.groups:
        attentions = tuple(
            replace(each, memory_len=source_len) if each.cross else each
            for each in group.layer.attentions
        )
        own_len = source_len if group.stack == "encoder" else 0
        layer = replace(group.layer, attentions=attentions, own_len=own_len)
        groups.append(replace(group, layer=layer))
    return replace(model, groups=tuple(groups))


@lru_cache(maxsize=64)
def parts_of(model: ModelSpec) -> tuple[ModelSpec, ...]:
    """An encoder and its decoder as models of their own, or the model itself. Kind: exact.

    Source: `ModelSpec.groups`.
    """
    names = list(dict.fromkeys(group.stack for group in model.groups))
    if len(names) == 1:
        return (model,)
    return tuple(_part(model, name, number) for number, name in enumerate(names))


def _part(model: ModelSpec, stack: str, number: int) -> ModelSpec:
    """One of two stacks as a model of its own: tables, norms and dropouts stand in pairs."""
    pairs = model.embeddings if model.splits_embeddings else model.embeddings[1:]
    shared = () if model.splits_embeddings else model.embeddings[:1]
    return replace(
        model,
        groups=tuple(group for group in model.groups if group.stack == stack),
        embeddings=(*shared, *pairs[number::2]),
        embedding_norms=model.embedding_norms[number::2],
        embedding_dropouts=model.embedding_dropouts[number::2],
        final_norms=model.final_norms[number::2],
        final_dropouts=model.final_dropouts[number::2],
    )


@lru_cache(maxsize=256)
def layers_in_order(model: ModelSpec) -> tuple[Layer, ...]:
    """The layers of one stack in the order of its forward. Kind: exact. Source: `LayerGroup`."""
    groups = model.groups
    if not all(group.positions for group in groups):
        return tuple(group.layer for group in groups for _ in range(group.count))
    placed = {place: group.layer for group in groups for place in group.positions}
    return tuple(placed[place] for place in sorted(placed))
