"""What a transformer is made of, as far as bytes, work and adapters depend on it.

A family (`whichlora.families`) turns a Hugging Face `config.json` into these values; every
formula reads only them, so a new architecture is one new file that describes its blocks. What a
layer is made of is in `spec.layer`, what sees or hears in `spec.tower`. All values are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear, Norm
from whichlora.spec.numeric import Count, is_plain, smallest
from whichlora.spec.tower import Tower

Task = Literal["causal-lm", "seq2seq-lm", "encoder"]
Pooling = Literal["mean", "cls", "lasttoken"]
PositionKind = Literal["learned", "frozen", "buffer"]


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
        scores_prompt_before: release before which `generate` gets logits of every token of a
            prompt; before 4.45 it does so of every class.
        narrow_loss_before: release of transformers up to which the class computes its own loss, of
            shifted logits that it does not widen (GPT-BigCode); empty where none does.
        returns_keys_before: release up to which the class returns keys and values as tuples, also
            in training, unless layers are checkpointed.
        caches_checkpointed_before: release up to which the class caches keys and values in training
            with checkpointing, too.
        caches_in_training: its text has a config of its own, which still says `use_cache` where the
            Trainer has set the model's to False; or a loop leaves the model's as it is.
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
        drafter: another model that drafts tokens for it, where an engine is asked to start with it.
        buffer_bytes: what modules keep beside parameters (a causal mask per attention).
        older_buffers: releases of transformers, and bytes that they keep more before each.
        tuples_until: release before which `generate` hands the class tuples of keys and values.
        caches_views: a prompt's cached values are views of one product with queries, until a
            release whose cache copies them; where no position rotates keys, they are, too.
        wide_keys_before: release before which fp32 tables of positions widen cached keys.
        positions_of_padding: first rows of its table of positions, which no token looks up.
        max_position_embeddings: of two stacks, positions that both have; max_prompt_positions:
            those of an encoder that has more (LED).
        shapes_of: the model whose config this is, where it is another's; it may state more
            positions, or fewer.
        file_type: of the GGUF file that its name means, where it is a tag of Ollama's library.
        embedding_dropouts, final_dropouts: widths of the tensors that training drops values of
            before the first and after the last layer.
        notes: what a reader must know: text tower only, approximated blocks, and so on.
        draft_note: that of them which holds where no engine loads its layers for drafts.
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
    scores_prompt_before: str = ""
    returns_keys_before: str = ""
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
    drafter: ModelSpec | None = None
    buffer_bytes: int = 0
    older_buffers: tuple[tuple[str, int], ...] = ()
    tuples_until: str = ""
    caches_views: bool = False
    wide_keys_before: str = ""
    embedding_dropouts: tuple[int, ...] = ()
    final_dropouts: tuple[int, ...] = ()
    max_position_embeddings: int | None = None
    max_prompt_positions: int | None = None
    positions_of_padding: int = 0
    shapes_of: str = ""
    file_type: str = ""
    dtype: str = "bfloat16"
    notes: tuple[str, ...] = ()
    draft_note: str = ""
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
