"""Every large request of a generation in order: loading, the pass over the prompt, decoding.

As `memory.step_events` does for training; an encoder has one pass and no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from whichlora.memory import activations, loss
from whichlora.memory.allocator import kernel_workspace_bytes
from whichlora.memory.allocator_simulator import rounded
from whichlora.memory.event_list import (
    Block,
    Chunk,
    EventList,
    Instance,
    asks_in_forward,
    play_loading,
)
from whichlora.memory.inference import Generation
from whichlora.memory.kv_cache import kept_tokens, viewed_bytes
from whichlora.memory.layer_bytes import layer_cases
from whichlora.memory.tower_events import (
    PLACE_BYTES,
    TowerForwardPlayer,
    TowerPass,
    projector_block,
)
from whichlora.memory.towers import TowerForward
from whichlora.spec.architecture import layers_in_order
from whichlora.spec.layer import Layer
from whichlora.spec.numeric import ceil_div, smallest
from whichlora.symbolic.language_head import logits_events, stack_end_events
from whichlora.symbolic.layer import BlockEvents, forward_events, stream_bytes
from whichlora.symbolic.linear_form import evaluate
from whichlora.symbolic.projectors import projector_forward_events
from whichlora.symbolic.token_embeddings import embedding_events

_MOST_STEPS = 32  # of a cache that grows; each takes most of a millisecond


class GenerationEvents(TowerForwardPlayer):
    """The events of loading and of one call of `generate`, or of one forward."""

    def __init__(self, run: Generation) -> None:
        super().__init__()
        self.run = run
        self._cache: list[list[int]] = [[] for _ in self.layers]  # tensors of each layer
        self._scores: int | None = None  # of the last token, which the loop names
        self._embeddings: dict[bool, BlockEvents | None] = {}  # of the prompt, of decoding

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return layers_in_order(self.run.model)

    @cached_property
    def _kinds(self) -> dict[Layer, int]:
        """Layers that differ, numbered."""
        return {layer: number for number, layer in enumerate(dict.fromkeys(self.layers))}

    @cached_property
    def _kind_of(self) -> tuple[int, ...]:
        """Which of `_kinds` each layer is."""
        return tuple(self._kinds[layer] for layer in self.layers)

    @property
    def _is_static(self) -> bool:
        return self.run.run.kv_cache == "static"

    @property
    def _is_one_forward(self) -> bool:
        return not self.run.model.can_generate

    def _width(self, layer: Layer) -> int:
        model = self.run.model
        return stream_bytes(layer, self.run.dtypes, after_norm=model.starts_in_layer_norm)

    # --- one layer ------------------------------------------------------------------------------

    def _block(
        self, layer: Layer, *, tokens: int, span: int, decoding: bool, workspace: int = 0
    ) -> Block:
        run = self.run
        dtypes = run.dtypes if decoding else run.reader
        window = layer.attentions[0].sliding_window
        # transformers 5.23 `StaticSlidingWindowLayer.update`: `full_key_states = key_states`
        reads_own = self._is_static and not decoding and self._overflows(layer)
        if reads_own:
            span = run.prompt_len
        elif window is not None and (decoding or self._is_static):
            span = smallest(span, window)
        tokens, span = layer.padded(tokens, span)
        ((_, running, masked, ragged),) = layer_cases(layer, dtypes, tokens=tokens, span=span)
        events = forward_events(
            running,
            run.model.stream_width,
            run.targets,
            dtypes,
            run.method,
            masked=masked,
            ragged=ragged,
            stream=self._width(layer),
            decoding=decoding,
            writes_cache=not (self._is_one_forward or (decoding and self._is_static)),
            reads_own=reads_own,
        )
        size = rounded(self._width(layer) * run.model.hidden_size * tokens)
        sizes = {"tokens": tokens, "span": span, "r": run.r}
        fixed = {}
        if self._is_static and events.in_cache:
            kept = kept_tokens(layer, run.last_tokens, kv_cache="static")
            fixed = {
                event.tensor: rounded(
                    evaluate(event.form, **sizes | {"tokens": kept * run.batch_size})
                )
                for event in events.forward
                if event.tensor in events.in_cache and event.form is not None
            }
        if workspace:
            fixed |= self.list.workspace_after(events.num_tensors, workspace)
            events = asks_in_forward(events)
        return Block(events, sizes, input_bytes=size, result_bytes=size, fixed=fixed)

    def _overflows(self, layer: Layer) -> bool:
        window = layer.attentions[0].sliding_window
        return window is not None and self.run.prompt_len > window

    def _run_layer(self, number: int, block: Block, stream: int) -> Instance:
        """Run layer `number` on `stream`, which its caller holds."""
        events = block.events
        first = self.list.numbers(events.num_tensors)
        shared = {tensor: first + tensor for tensor in (events.result, *events.in_cache)}
        instance = Instance(block, first, {0: stream} | shared)
        before, self._cache[number] = self._cache[number], []
        together = self.layers[number].attentions[0].sliding_window is not None
        for part in block.forward.parts:
            self._play_part(part, instance)
            if isinstance(part, Chunk) or part[0] not in events.in_cache:
                continue
            self._cache[number].append(instance.streams[part[0]])
            if not together or len(self._cache[number]) == len(events.in_cache):
                count = len(before) if together else 1
                for old in before[:count]:
                    self._let_go(old)
                before = before[count:]
        self._cache[number] += before  # written in place
        return instance

    def _embedding_events(self, *, decoding: bool) -> BlockEvents | None:
        run = self.run
        if decoding not in self._embeddings:
            dtypes = run.dtypes if decoding else run.reader
            self._embeddings[decoding] = embedding_events(
                run.model, dtypes, run.method, run.targets, needs_grad=False
            )
        return self._embeddings[decoding]

    @cached_property
    def _stack_end_events(self) -> BlockEvents | None:
        run = self.run
        stream = self._width(self.layers[-1])
        return stack_end_events(run.model, run.dtypes, run.method, run.targets, stream=stream)

    # --- images ---------------------------------------------------------------------------------

    def _see(self, forward: TowerForward) -> TowerPass:
        """The tower's forward, whose first block asks for a workspace.

        Source: transformers 5.23 `_prepare_multimodal_encoder_kwargs_for_generation`, whose results
        `model_kwargs` hold to the end.
        """
        stack = forward.tower.stack
        layers = layers_in_order(stack)
        kinds = {layer: self._tower_block(forward, layer) for layer in dict.fromkeys(layers)}
        blocks = [kinds[layer] for layer in layers]
        if self._workspace:
            blocks[0] = self._tower_block(forward, layers[0], workspace=self._workspace)
        settings = forward.tower, forward.targets, forward.dtypes, forward.method
        events = projector_forward_events(*settings, stream=forward.stream, kept=forward.kept)
        return self._tower_forward(
            forward,
            blocks,
            projector_block(forward, events),
            masks=forward.block_masks,
        )

    def _tower_block(self, forward: TowerForward, layer: Layer, *, workspace: int = 0) -> Block:
        stack, dtypes = forward.tower.stack, forward.dtypes
        sizes = {"tokens": forward.num_patches, "span": forward.span, "r": forward.r}
        of_layer = {name: sizes[name] for name in ("tokens", "span")}
        ((_, running, masked, ragged),) = layer_cases(layer, dtypes, **of_layer)
        width = stream_bytes(layer, dtypes, after_norm=stack.starts_in_layer_norm)
        events = forward_events(
            running,
            stack.stream_width,
            forward.targets,
            dtypes,
            forward.method,
            masked=masked,
            ragged=ragged,
            stream=width,
        )
        fixed = {}
        if workspace:
            fixed = self.list.workspace_after(events.num_tensors, workspace)
            events = asks_in_forward(events)
        size = rounded(width * stack.hidden_size * forward.num_patches)
        return Block(events, sizes, input_bytes=size, result_bytes=size, fixed=fixed)

    def _put_images(self, forward: TowerForward, *, tokens: int) -> tuple[list[int], list[int]]:
        """Vectors as the model's forward has them, and where they go in its `tokens`.

        Source: transformers 5.23 `Qwen2_5_VLModel.forward`.
        """
        width = self.run.model.hidden_size * self._width(self.layers[0])
        vector_bytes = forward.num_vectors * width
        copies = [self.list.born(vector_bytes) for _ in range(forward.tower.copies)]
        return copies, [self.list.born(tokens * self.run.model.hidden_size * PLACE_BYTES)]

    # --- one pass -------------------------------------------------------------------------------

    @cached_property
    def _workspace(self) -> int:
        return kernel_workspace_bytes(self.run.gpu, self.run.dtypes)

    def _pass(self, *, queries: int, span: int, decoding: bool) -> None:
        run, model = self.run, self.run.model
        tokens = run.batch_size * queries
        dtypes = run.dtypes if decoding else run.reader
        table = model.embeddings[0]
        rows_bytes = rounded(tokens * table.width * dtypes.embedding_bytes)
        events = self._embedding_events(decoding=decoding)
        sizes = {"tokens": tokens, "span": span, "r": run.r}
        block = None
        if events is not None:
            result_bytes = rounded(self._width(self.layers[0]) * model.hidden_size * tokens)
            block = Block(events, sizes, input_bytes=rows_bytes, result_bytes=result_bytes)
        tower = None if decoding else run.tower
        seen: TowerPass | None = None
        if tower is not None and not tower.tower.embeds_first:
            seen = self._see(tower)
        copies: list[int] = []

        def look() -> list[int]:
            nonlocal seen, copies
            if tower is None:
                return []
            seen = seen or self._see(tower)
            copies, places = self._put_images(tower, tokens=tokens)
            return places

        rows, stream, embedded = self._embedded(
            block, model, rows_bytes=rows_bytes, keeps_rows=False, look=look
        )
        positions = queries if self._is_one_forward else tokens
        around: list[int] = []
        if not decoding:
            masks = activations.kept_masks(model, dtypes, tokens=tokens, span=span)
            around += [self.list.born(size) for size in masks]
        around += self._rotary(
            activations.rotary_bytes(model, dtypes, span=positions),
            stream_bytes=dtypes.stream_bytes,
        )
        blocks = [
            self._block(layer, tokens=tokens, span=span, decoding=decoding) for layer in self._kinds
        ]
        ordered = [blocks[kind] for kind in self._kind_of]
        if self._workspace and not decoding and tower is None:
            ordered[0] = self._block(
                self.layers[0], tokens=tokens, span=span, decoding=False, workspace=self._workspace
            )
        before: Instance | None = None
        for number, block in enumerate(ordered):
            instance = self._run_layer(number, block, stream)
            if before is not None:
                self._kill(before, before.block.events.copies)
            self._let_go(stream)
            before, stream = instance, instance.streams[instance.block.events.result]
        self._finish(stream, rows, around + copies, tokens=tokens, sizes=sizes)
        if seen is not None and seen.forward.tower.embeds_first:
            self._leave_images(seen)
        for last in (before, embedded):
            if last is not None:
                self._kill(last, last.block.events.copies)

    def _finish(
        self, stream: int, rows: int, around: list[int], *, tokens: int, sizes: dict[str, int]
    ) -> None:
        """The last norm of every position, and the logits of the last, or all of one forward."""
        run, model, dtypes = self.run, self.run.model, self.run.dtypes
        events = self._stack_end_events
        if events is not None:
            size = rounded(self._width(self.layers[-1]) * model.hidden_size * tokens)
            block = Block(events, sizes, input_bytes=size, result_bytes=size)
            _, result = self._forward(block, stream)
            self._let_go(stream)
            stream = result
        self._let_go(rows)
        self.list.die(*around)
        width = loss.logit_width(model)
        if self._is_one_forward:
            events = logits_events(
                model, dtypes, run.method, run.targets, stream=dtypes.stream_bytes
            )
            if events is not None:
                size = rounded(dtypes.stream_bytes * model.hidden_size * tokens)
                block = Block(events, sizes, input_bytes=size, result_bytes=0)
                _, logits = self._forward(block, stream)
                self._let_go(logits)
            self._let_go(stream)
            return
        logits = self.list.born(width * run.batch_size * run.element_bytes)
        self._let_go(stream)
        if model.logit_softcap:
            for _ in range(3):
                capped = self.list.born(width * run.batch_size * run.element_bytes)
                self.list.die(logits)
                logits = capped
        scores = self.list.born(4 * width * run.batch_size)
        if self._scores is not None:
            self.list.die(self._scores)
        self._scores = scores
        self.list.die(logits)

    def stages(self) -> Iterator[EventList]:
        """The events up to the end of the prompt's pass, then up to that of each decoding step."""
        run = self.run
        play_loading(self.list, run.model, run.dtypes)
        for size in () if run.tower is None else run.tower.pixel_tensors:
            self.list.born(size)  # `generate` holds them to the end
        self._pass(queries=run.prompt_len, span=run.sized["span"], decoding=False)
        last = 0 if self._is_one_forward else run.max_new_tokens - 1
        count = min(last, 2 if self._is_static else _MOST_STEPS)  # steps of a static one are alike
        self.list.skips_steps = count < last and not self._is_static
        yield self.list
        for number in range(1, count + 1):
            span = run.first_tokens + ceil_div(number * last, count)
            self._pass(queries=1, span=run.last_tokens if self._is_static else span, decoding=True)
            yield self.list


def has_events(run: Generation) -> bool:
    """Whether all of a generation is written as events. Kind: exact.

    Source: what `GenerationEvents` leaves out.
    """
    model = run.model
    attentions = [attention for layer in model.layers() for attention in layer[0].attentions]
    return (
        model.task in ("causal-lm", "encoder")
        and run.run.kv_cache in ("dynamic", "static")
        and run.stored is None
        and not loss.scores_prompt(model, run.dtypes)
        and not run.caches_in_tuples
        and not viewed_bytes(model, run.dtypes)
        and all(attention.kind == "softmax" for attention in attentions)
        and not any(attention.projection.startswith("latent") for attention in attentions)
        and not any(attention.keeps_keys for attention in attentions)
        and not any(group.shared for group in model.groups)
        and model.layer_input_norm is None
        and model.streams is None
        and (model.tower is None or not model.tower.attended)
    )


def generation_stages(run: Generation) -> Iterator[EventList]:
    """Large requests of loading and one generation in order, pass by pass; small ones as a sum.

    The list is the same each time, and longer.

    Kind: exact as far as the blocks are. Source: the libraries' functions named above.
    """
    return GenerationEvents(run).stages()


def generation_events(run: Generation) -> EventList:
    """All of `generation_stages`. Kind: exact as far as the blocks are. Source: as of it."""
    *_, events = generation_stages(run)
    return events
