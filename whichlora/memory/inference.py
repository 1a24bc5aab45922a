"""The ledger of inference: the prompt pass and the last decoding step.

One function per moment, as in `memory.moments`; what several moments read is in `Generation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

from whichlora.memory import activations, allocator, kv_cache, loss, quantised_cache
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.exllama import scratch_entries
from whichlora.memory.gradients import adapter_entries
from whichlora.memory.layer_bytes import forward_bytes
from whichlora.memory.loading import loading_moment, unsplit_weights
from whichlora.memory.metal_heaps import idle_in_heaps
from whichlora.memory.towers import EMBEDDED_TEXT, TOWER_FORWARD, TowerForward, tower_dtypes
from whichlora.memory.training import Ledger
from whichlora.memory.weights import weight_entries
from whichlora.methods.base import Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Count, largest, smallest
from whichlora.spec.run import CacheFormat, RunConfig

Entries = tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One call of `generate`, or the forward of a model that generates nothing.

    Args:
        targets: names of the matrices whose adapters are not merged, if any.
        batch_size, prompt_len, max_new_tokens, r: of the run, or arrays in their place.
    """

    model: ModelSpec
    run: RunConfig
    dtypes: Dtypes
    method: Method
    gpu: GpuSpec
    targets: tuple[str, ...]
    batch_size: Count
    prompt_len: Count
    max_new_tokens: Count
    r: Count

    @cached_property
    def static(self) -> Entries:
        entries = weight_entries(self.model, self.dtypes, like=self.batch_size)
        entries.append(
            unsplit_weights(
                self.model,
                self.dtypes,
                self.gpu,
                expandable=self.run.expandable_segments,
                like=self.batch_size,
            )
        )
        entries += scratch_entries(self.model, self.dtypes, like=self.batch_size)
        if self.targets:
            entries += adapter_entries(
                self.model, self.run, self.dtypes, self.method, self.targets, self.r
            )
        return tuple(entries)

    @cached_property
    def tower(self) -> TowerForward | None:
        """What reads the images of all prompts."""
        if self.model.tower is None:
            return None
        return TowerForward(
            tower=self.model.tower,
            run=self.run,
            dtypes=tower_dtypes(self.model.tower, self.run, self.dtypes),
            method=self.method,
            targets=self.targets,
            num_images=self.batch_size * self.model.tower.inputs(self.run.images, self.run.audios),
            r=self.r,
        )

    @property
    def element_bytes(self) -> int:
        """Of keys, values and logits, and of an encoder's hidden states."""
        return self.dtypes.compute_bytes

    @property
    def stored(self) -> CacheFormat | None:
        """The format of a quantised cache."""
        return self.run.cache_format

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt, so that the decoder begins with one token."""
        return self.model.task == "seq2seq-lm" and self.model.groups[0].stack == "encoder"

    @property
    def encoder_tokens(self) -> Count:
        """Positions of one sequence that cross attention reads."""
        if self.tower is None:
            return self.prompt_len
        return self.tower.grid.vectors * self.tower.tower.inputs(self.run.images, self.run.audios)

    @cached_property
    def prompt_tokens(self) -> Count:
        return self.batch_size * self.prompt_len

    @cached_property
    def first_tokens(self) -> Count:
        """Tokens of one sequence in the decoder's first pass."""
        return 1 + 0 * self.prompt_len if self.has_encoder else self.prompt_len

    @cached_property
    def last_tokens(self) -> Count:
        """Tokens of one sequence in its last pass; no later pass reads the token made there."""
        return self.first_tokens + self.max_new_tokens - 1

    # --- the cache ------------------------------------------------------------------------------

    @cached_property
    def prompt_cache(self) -> Count:
        """What the prompt pass leaves; a static cache is as large as it will ever be."""
        # `StaticLayer.lazy_initialization` makes all `max_cache_len` tokens at the first `update`
        is_static = self.run.kv_cache == "static"
        tokens = self.last_tokens if is_static else self.first_tokens
        return self._cache(tokens, after_prompt=True)

    @cached_property
    def grown_cache(self) -> Count:
        """What the second pass makes of it, but for the one token more."""
        return self._cache(self.first_tokens)

    @cached_property
    def full_cache(self) -> Count:
        return self._cache(self.last_tokens)

    def _cache(self, tokens: Count, *, after_prompt: bool = False) -> Count:
        beside: Count = 0
        if self.run.kv_cache == "dynamic":
            per_token = kv_cache.widened_keys_bytes(self.model, self.dtypes)
            per_token += kv_cache.viewed_bytes(self.model, self.dtypes) * after_prompt
            beside = per_token * self.batch_size * tokens
        return beside + kv_cache.cache_bytes(
            self.model,
            batch_size=self.batch_size,
            tokens=tokens,
            kv_cache=self.run.kv_cache,
            element_bytes=self.element_bytes,
            encoder_tokens=self.encoder_tokens,
            after_prompt=after_prompt,
            stored=self.stored,
        )

    @property
    def caches_in_tuples(self) -> bool:
        return kv_cache.caches_in_tuples(self.model, self.dtypes)

    @cached_property
    def appended(self) -> Count:
        """The second copy of what a step appends to."""
        if self.run.kv_cache == "dynamic" and self.caches_in_tuples:
            # the first token needs no second pass
            return self._cache(self.last_tokens - 1) * (self.max_new_tokens > 1)
        # `DynamicLayer.update`: `self.keys = torch.cat([self.keys, key_states], dim=-2)` holds the
        # shorter tensor until the longer one is assigned
        return kv_cache.append_transient_bytes(
            self.model,
            batch_size=self.batch_size,
            tokens=self.last_tokens,
            kv_cache=self.run.kv_cache,
            element_bytes=self.element_bytes,
        )

    # --- the passes -----------------------------------------------------------------------------

    @cached_property
    def reader(self) -> Dtypes:
        """What the pass over the prompt runs with."""
        reader = self.dtypes
        if self.model.task == "causal-lm" and self.run.kv_cache == "static":
            # The end that is still empty must be masked: `StaticLayer.get_mask_sizes` gives all of
            # it. More than there is for SDPA without padding: `_ignore_causal_mask_sdpa` of
            # transformers 5.23 makes no mask at `q_offset == 0`, though it does for fake tensors
            # (`is_tracing`)
            reader = replace(reader, padded=True)
        return reader if self.stored is None else replace(reader, stores=self.stored)

    @cached_property
    def sized(self) -> dict[str, Count]:
        """Tokens of the prompt pass, and the span that each of them attends to."""
        span = self.prompt_len
        if self.model.task == "causal-lm" and self.run.kv_cache == "static":
            span = self.last_tokens  # such a cache is attended to as a whole
        return {"tokens": self.prompt_tokens, "span": span}

    @cached_property
    def prompt_forward(self) -> Count:
        """One layer's forward over the prompt, and what all layers share meanwhile."""
        working = self._prompt_forward(self.reader)
        if self.reader.padded == self.dtypes.padded:
            return working
        # without that mask grouped keys in fp32 have no fused kernel
        return largest(
            working, self._prompt_forward(replace(self.reader, padded=self.dtypes.padded))
        )

    def _prompt_forward(self, reader: Dtypes, *, makes_bias: bool = False) -> Count:
        model, is_decoder = self.model, self.model.task == "causal-lm"
        working = forward_bytes(
            model,
            reader,
            side="encoder" if self.has_encoder else "",
            prompt=model.can_generate or model.task == "encoder",
            queries=self.prompt_len,
            fills_cache=self.run.kv_cache == "dynamic" and model.label_head is None,
            makes_bias=makes_bias,
            targets=self.targets,
            method=self.method,
            r=self.r,
            **self.sized,
        )
        # `generate` makes position ids per sequence, the other models one row for all
        positions = self.prompt_tokens if is_decoder and model.can_generate else self.prompt_len
        working = working + activations.rotary_bytes(model, self.dtypes, span=positions)
        if is_decoder:
            masks = activations.kept_mask_bytes(model, reader, checkpointed=True, **self.sized)
            return working + masks
        if model.task == "encoder":
            working = working + activations.sequence_bias_bytes(model, reader, **self.sized)
        return working

    @property
    def encoder_forward(self) -> Count:
        """The same of an encoder, beside the biases that its layers share.

        Its first layer may make a bias of blocks for all of them, which is not there by then.
        """
        layers = self.model.layers()
        if not any(attention.in_blocks for layer, _ in layers for attention in layer.attentions):
            return self.prompt_forward
        of_blocks = partial(activations.block_bias_bytes, self.model, self.dtypes, **self.sized)
        making = self._prompt_forward(self.reader, makes_bias=True)
        return largest(self.prompt_forward, making + of_blocks(unbiased="encoder") - of_blocks())

    @cached_property
    def token_forward(self) -> Count:
        """One layer's forward over the last token of each sequence."""
        return forward_bytes(
            self.model,
            self.dtypes,
            tokens=self.batch_size,
            span=self.last_tokens,
            side="decoder" if self.has_encoder else "",
            decoding=True,
            targets=self.targets,
            method=self.method,
            r=self.r,
        )

    @cached_property
    def last_logits(self) -> Entry:
        size = loss.generation_bytes(
            self.model, batch_size=self.batch_size, compute_bytes=self.element_bytes
        )
        return Entry(LAST_LOGITS, size)

    @cached_property
    def last_scores(self) -> Entry:
        """Of the token before, while the layers run."""
        # the loop of `GenerationMixin._sample` names the scores until it has the next ones
        # (`del outputs` at its end drops the logits of the model)
        return Entry(LAST_SCORES, 4 * self.batch_size * loss.logit_width(self.model))

    @cached_property
    def encoded(self) -> Entry:
        width = self.model.hidden_size * self.dtypes.stream_bytes
        tokens, _ = self.model.groups[0].layer.padded(self.prompt_tokens, self.prompt_len)
        return Entry(ENCODED, tokens * width)


# --- the pass over the prompt -----------------------------------------------------------------

PROMPT_CACHE = Fact(
    part="kv_cache",
    what="key-value cache of the prompt",
    shape="[batch_size, num_key_value_heads, prompt_len, head_dim]",
    dtype="compute_bytes",
    count="2 x num_hidden_layers",
    why="decoding reads keys and values of every earlier token",
    source="transformers DynamicLayer.update; docs/kv_cache.md",
)
PROMPT_FORWARD = Fact(
    part="activations",
    what="one layer's forward over the prompt",
    shape="[batch_size, prompt_len, …]",
    dtype="compute_bytes",
    why="four hidden states and the wider of MLP and attention; no layer keeps anything",
    source="trace of GenerationMixin.generate, docs/memory.md section 5",
    kind="estimate",
)


HANDED_ON = Fact(
    part="activations",
    what="keys and values of whole prompts that later layers read",
    shape="[batch_size, num_key_value_heads, prompt_len, head_dim]",
    dtype="compute_bytes",
    count="2 for each layer with a window whose keys later layers read",
    why="a static cache keeps a window of them, a dict of the model's forward all",
    source="transformers StaticSlidingWindowLayer.update; Gemma4TextModel.forward",
)


def prefill(run: Generation) -> Entries:
    """In the last layer over the prompt, while the cache of those before it is there."""
    # `DynamicLayer.update` of transformers 5.23 joins an empty tensor with `key_states`: a copy
    # that it keeps and returns, so that attention reads the cache's own tensors
    cache = Entry(PROMPT_CACHE, run.prompt_cache)
    if run.stored is not None:
        earlier = quantised_cache.stored_by_earlier_layers(
            run.model,
            run.stored,
            batch_size=run.batch_size,
            tokens=run.prompt_len,
            element_bytes=run.element_bytes,
        )
        cache = Entry(quantised_cache.QUANTISED_CACHE, earlier)
    forward = Entry(PROMPT_FORWARD, run.prompt_forward)
    if run.run.kv_cache != "static":  # whose keys are parts of these
        return (*run.static, cache, forward)
    handed_on = kv_cache.handed_on_bytes(
        run.model,
        batch_size=run.batch_size,
        tokens=run.prompt_len,
        element_bytes=run.element_bytes,
    )
    return (*run.static, cache, Entry(HANDED_ON, handed_on), forward)


LAST_HIDDEN = Fact(
    part="activations",
    what="last hidden states",
    shape="[batch_size, prompt_len, hidden_size]",
    dtype="stream_bytes",
    why="the head reads them",
    source="trace of GenerationMixin.generate",
)
PROMPT_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of the prompt",
    shape="[batch_size, 1, vocab_size]",
    dtype="fp32",
    why="scores of the last position; of the whole prompt before transformers 4.45",
    source="transformers GenerationMixin._sample",
)


def first_logits(run: Generation) -> Entries:
    """At the head, which reads the last position alone since transformers 4.45."""
    model, scored = run.model, run.batch_size * run.first_tokens
    # `slice_logits_to_keep` cuts after the last norm, so that the norm still reads every position:
    # the stream, and the fp32 copy that the last norm makes of it
    last_hidden = run.prompt_tokens * model.hidden_size * 6
    scores = run.last_logits.num_bytes
    if run.dtypes.libraries.scores_whole_prompt:
        last_hidden = scored * model.hidden_size * run.element_bytes
        scores = loss.prompt_bytes(model, run.dtypes, tokens=scored)
    elif loss.scores_prompt(model, run.dtypes):
        last_hidden = scored * model.hidden_size * run.element_bytes
        scores = scores + loss.prompt_bytes(model, run.dtypes, tokens=scored)
    fact = PROMPT_CACHE if run.stored is None else quantised_cache.QUANTISED_CACHE
    return (
        *run.static,
        Entry(fact, run.prompt_cache),
        run.encoded if run.has_encoder else Entry(LAST_HIDDEN, last_hidden),
        Entry(PROMPT_LOGITS, scores),
    )


HELD_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of the prompt, as the model returned them",
    shape="[batch_size, prompt_len, vocab_size]",
    dtype="fp32, or that of the head where the class does not widen them",
    why="the caller holds the first output until the second is there",
    source="transformers 4.38 GenerationMixin.greedy_search",
)
TWO_CACHES = Fact(
    part="kv_cache",
    what="cache of the prompt, and a second one with one token more",
    shape="[batch_size, num_key_value_heads, prompt_len, head_dim]",
    dtype="compute_bytes",
    count="4 x num_hidden_layers",
    why="tuples of older versions are replaced only when all are there",
    source="transformers 4.38 LlamaForCausalLM.forward",
)


def second_token(run: Generation) -> Entries:
    """In the second pass of old versions, whose caller still names the first one's output."""
    again = run.max_new_tokens > 1
    width = loss.logit_width(run.model)
    held = loss.prompt_logit_bytes(run.model, run.dtypes) * run.dtypes.libraries.holds_outputs
    held = held * run.batch_size * run.first_tokens * width * again
    second = run.caches_in_tuples * again * run.grown_cache
    return (
        *run.static,
        Entry(TWO_CACHES, run.prompt_cache + second),
        Entry(HELD_LOGITS, held),
        run.last_logits,
    )


# --- the last decoding step -------------------------------------------------------------------

FULL_CACHE = Fact(
    part="kv_cache",
    what="key-value cache of whole sequences",
    shape="[batch_size, num_key_value_heads, prompt_len + max_new_tokens - 1, head_dim]",
    dtype="compute_bytes",
    count="2 x num_hidden_layers",
    why="decoding reads keys and values of every earlier token",
    source="transformers DynamicLayer.update; docs/kv_cache.md",
)
APPENDED = Fact(
    part="temporary",
    what="second copy of what is appended to",
    shape="[batch_size, num_key_value_heads, prompt_len + max_new_tokens - 1, head_dim]",
    dtype="compute_bytes",
    why="concatenation makes a new tensor before the old one goes",
    source="transformers DynamicLayer.update",
)
TOKEN_FORWARD = Fact(
    part="activations",
    what="one layer's forward over one token",
    shape="[batch_size, 1, …]",
    dtype="compute_bytes",
    why="four hidden states and the wider of MLP and attention; no layer keeps anything",
    source="trace of GenerationMixin.generate, docs/memory.md section 5",
    kind="estimate",
)
LAST_LOGITS = Fact(
    part="logits_and_loss",
    what="logits of the last positions",
    shape="[batch_size, vocab_size]",
    dtype="fp32",
    why="logits, their fp32 copy and the processed scores, while a token is picked",
    source="transformers GenerationMixin._sample",
)


LAST_SCORES = Fact(
    part="logits_and_loss",
    what="scores of the last token",
    shape="[batch_size, vocab_size]",
    dtype="fp32",
    why="a name of the loop holds them until the next ones are there",
    source="transformers GenerationMixin._sample",
)


def decode(run: Generation) -> Entries:
    """In a layer of the last step, whose cache is the longest."""
    # `torch.cat` in `DynamicLayer.update` writes the longer tensor before the shorter goes
    scores = run.last_scores
    if run.dtypes.libraries.holds_outputs:  # no `del outputs`: its logits are there, too
        scores = run.last_logits
    return (
        *run.static,
        Entry(FULL_CACHE, run.full_cache),
        Entry(APPENDED, run.appended),
        Entry(TOKEN_FORWARD, run.token_forward),
        scores,
        *([run.encoded] if run.has_encoder else []),
    )


def last_logits(run: Generation) -> Entries:
    """While the last token is picked, after the layers."""
    return (
        *run.static,
        Entry(FULL_CACHE, run.full_cache),
        run.last_logits,
        *([run.encoded] if run.has_encoder else []),
    )


def quantised_moments(run: Generation, stored: CacheFormat) -> dict[str, Entries]:
    """The last step, the last one that quantises the whole cache anew, and picking a token."""
    by_moment = quantised_cache.decode_moments(
        run.model,
        run.dtypes,
        stored,
        batch_size=run.batch_size,
        prompt_len=run.prompt_len,
        max_new_tokens=run.max_new_tokens,
    )
    in_step = (Entry(TOKEN_FORWARD, run.token_forward), run.last_scores)
    moments = {name: (*run.static, *cache, *in_step) for name, cache in by_moment.items()}
    cache = [x for x in by_moment["decode"] if x.fact is not quantised_cache.EXPANDED]
    return moments | {"last_logits": (*run.static, *cache, run.last_logits)}


# --- an encoder, alone or before a decoder, and a model of rewards -----------------------------

ENCODED = Fact(
    part="activations",
    what="the encoder's output",
    shape="[batch_size, prompt_len, hidden_size]",
    dtype="stream_bytes",
    why="the caller holds it for every token that the decoder makes",
    source="transformers GenerationMixin._prepare_encoder_decoder_kwargs_for_generation",
)


def encode(run: Generation) -> Entries:
    """In a layer of the encoder that reads the prompt of a decoder."""
    # `_prepare_encoder_decoder_kwargs_for_generation` runs it before there is any cache
    shared = activations.kept_mask_bytes(
        run.model, run.dtypes, tokens=run.prompt_tokens, span=run.prompt_len, side="encoder"
    )
    positions = _named_positions(run.model, tokens=run.prompt_tokens, span=run.prompt_len)
    shared = shared + positions * run.element_bytes
    working = run.encoder_forward + shared
    first, sized = run.model.groups[0].layer, run.sized
    making = activations.making_mask_bytes(first, run.dtypes, **sized)
    rows = first.padded(**sized)[0] * run.model.hidden_size * run.dtypes.embedding_bytes
    return (*run.static, Entry(PROMPT_FORWARD, largest(working, making + rows)))


def _named_positions(model: ModelSpec, *, tokens: Count, span: Count) -> Count:
    """Elements of the looked-up positions, which BART's encoder names beside the tokens.

    Source: transformers 5.23 `BartEncoder.forward`, `embed_pos`.
    """
    tables = [table for table in model.embeddings if "position" in table.name]
    if not tables:
        return 0 * tokens
    return tables[0].width * (tokens if tables[0].per_sequence else span)


CROSS_PROJECTED = Fact(
    part="activations",
    what="keys and values of one cross attention",
    shape="[batch_size, prompt_len, k_width + v_width]",
    dtype="compute_bytes",
    why="the cache copies what the projections return, and the last layer's are still there",
    source="transformers DynamicLayer.update; trace of GenerationMixin.generate",
)


def first_token(run: Generation) -> Entries:
    """In the decoder's first pass, which projects the encoder's output for every layer."""
    # later passes find `past_key_values.is_updated` and read the cache (`BartAttention.forward`)
    width = _largest_cross(run.model) * run.element_bytes
    return (
        *run.static,
        Entry(PROMPT_CACHE, run.prompt_cache),
        run.encoded,
        Entry(CROSS_PROJECTED, width * run.prompt_tokens),
    )


def _largest_cross(model: ModelSpec) -> int:
    """Elements per token of the keys and values that one layer takes from the encoder's output."""
    return max(
        attention.k_width + attention.v_width
        for layer, _ in model.layers()
        for attention in layer.attentions
        if attention.cross
    )


EVERY_LOGIT = Fact(
    part="logits_and_loss",
    what="logits of every position",
    shape="[batch_size, prompt_len, vocab_size]",
    dtype="compute_bytes",
    why="an encoder's own head returns them",
    source="transformers BertForMaskedLM.forward",
)
EVERY_LABEL = Fact(
    part="logits_and_loss",
    what="scores of the labels",
    shape="[batch_size, prompt_len, num_labels]",
    dtype="compute_bytes",
    why="a decoder's head scores all positions, of which the last is picked",
    source="transformers 5.23 GenericForSequenceClassification.forward",
)


def forward_moments(run: Generation) -> dict[str, Entries]:
    """In the worst layer, and at the head that scores every position."""
    hidden = 2 * run.model.hidden_size * run.prompt_tokens * run.element_bytes
    return {
        "forward": (*run.static, Entry(PROMPT_FORWARD, run.prompt_forward)),
        "logits": (
            *run.static,
            Entry(LAST_HIDDEN, hidden),
            Entry(EVERY_LOGIT if run.model.label_head is None else EVERY_LABEL, _every_logit(run)),
        ),
    }


def _every_logit(run: Generation) -> Count:
    head = run.model.label_head
    if head is not None:
        rows = run.batch_size if head.pools == "before" else run.prompt_tokens
        return rows * head.projection.out_features * run.element_bytes
    return loss.encoder_bytes(run.model, tokens=run.prompt_tokens, compute_bytes=run.element_bytes)


# --- the ledger -------------------------------------------------------------------------------


def inference_ledger(generation: Generation) -> Ledger:
    """Moments of one generation, the prompt pass and the last decoding step, or of one forward."""
    model, like = generation.model, generation.batch_size
    moments = (generation_moments if model.can_generate else forward_moments)(generation)
    ledger = Ledger(
        moments=with_images(generation, moments)
        | loading_moment(model, generation.dtypes, like=like),
        idle_bytes=0,
        workspace_bytes=allocator.workspace_bytes(generation.gpu, training=False),
    )
    outgrown = _outgrown(generation) if model.can_generate else 0 * like
    idle = (
        _idle(generation, ledger, outgrown)
        if model.can_generate
        else _idle_of_forward(generation, ledger)
    )
    peak = ledger.peak_allocated_bytes
    idle = idle_in_heaps(generation.gpu, peak_bytes=peak, idle_bytes=idle)
    return replace(ledger, idle_bytes=idle, returned_bytes=smallest(idle, outgrown))


def with_images(run: Generation, moments: dict[str, Entries]) -> dict[str, Entries]:
    """`moments`, and that of a vision tower over the images of all prompts, if there is one."""
    tower = run.tower
    if tower is None:
        return moments
    # `_prepare_multimodal_encoder_kwargs_for_generation` comes before the text is looked up
    running: Entries = (tower.narrow_pixels, Entry(TOWER_FORWARD, tower.working))
    if tower.tower.embeds_first:
        looked_up = run.prompt_tokens * run.model.hidden_size * run.dtypes.embedding_bytes
        running = (Entry(EMBEDDED_TEXT, looked_up), *running)
    # `model_kwargs` of `generate` hold the pixels to the end
    result = {tower.tower.reads: (*run.static, tower.pixels, *running)}
    if tower.tower.names_blocks:
        made = tower.named(run.model.hidden_size), tower.masking(run.prompt_len)
        result["images_masked"] = (*run.static, tower.pixels, *made)
    for name, entries in moments.items():
        is_held = name == "prefill" or tower.tower.transcribes
        named = (tower.named(run.model.hidden_size),) if is_held else ()
        result[name] = (*entries, tower.pixels, *named)
    return result


def generation_moments(run: Generation) -> dict[str, Entries]:
    """Every moment that can be the peak of a decoder; of equal ones the first is named."""
    moments = {
        "prefill": encode(run) if run.has_encoder else prefill(run),
        "first_logits": first_logits(run),
        "decode": decode(run),
        "last_logits": last_logits(run),
    }
    if run.stored is not None:
        moments |= quantised_moments(run, run.stored)
    if run.has_encoder:
        moments["first_token"] = first_token(run)
    if run.caches_in_tuples or run.dtypes.libraries.scores_whole_prompt:
        moments["second_token"] = second_token(run)
    return moments


def _outgrown(run: Generation) -> Count:
    """Whole segments that a growing cache has left."""
    if run.run.kv_cache != "dynamic":
        return 0 * run.full_cache
    return kv_cache.left_behind_bytes(
        run.model,
        batch_size=run.batch_size,
        first_tokens=run.first_tokens,
        last_tokens=run.last_tokens,
        element_bytes=run.element_bytes,
    )


def _idle(run: Generation, ledger: Ledger, outgrown: Count) -> Count:
    """Segments that a growing cache, or the layers over the prompt, have left."""
    idle = allocator.idle_cache_bytes(
        run.gpu,
        logits_bytes=outgrown,
        layer_bytes=run.appended,
        expandable=run.run.expandable_segments,
    )
    after_prompt = ledger.moment_bytes("prefill") + allocator.idle_after_prompt_bytes(
        run.gpu,
        forward_bytes=run.prompt_forward,
        cache_bytes=run.prompt_cache * (not run.has_encoder),
    )
    return largest(idle, after_prompt - ledger.peak_allocated_bytes)


def _idle_of_forward(run: Generation, ledger: Ledger) -> Count:
    """Blocks as wide as the vocabulary can't be cut from what the layers leave."""
    if run.gpu.backend.allocator == "host":
        return 0 * run.batch_size
    model, row_bytes = run.model, run.prompt_tokens * run.element_bytes
    working = run.prompt_forward
    apart = allocator.in_whole_segments(working, model.hidden_size * row_bytes)
    width = loss.logit_width(model)
    apart = apart + allocator.in_whole_segments(_every_logit(run), width * row_bytes)
    reserved = ledger.moment_bytes("forward") - working + apart
    idle = largest(0, reserved - ledger.peak_allocated_bytes)
    if run.run.expandable_segments:  # one page more of each pool at the most
        idle = smallest(idle, working + allocator.PAGES_BYTES)
    return idle
