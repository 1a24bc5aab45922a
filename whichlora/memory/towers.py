"""A vision tower that reads images and keeps no graph: frozen in training, and in inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from whichlora.memory.activations import kept_masks
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.layer_bytes import forward_bytes
from whichlora.methods.base import Method
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.numeric import Count, added, largest
from whichlora.spec.run import RunConfig
from whichlora.spec.tower import SAMPLING_RATE, ImageGrid, Tower
from whichlora.symbolic.layer import stream_bytes
from whichlora.symbolic.linear_form import most
from whichlora.symbolic.projectors import projector_working_points, result_bytes

PIXELS = Fact(
    part="activations",
    what="pixels of the images",
    shape="[batch_size, images, …]",
    dtype="as the processor returns them",
    why="part of the batch, which a variable of the caller holds until the next one is read",
    source="transformers Trainer._run_epoch, GenerationMixin.generate",
)
NARROW_PIXELS = Fact(
    part="activations",
    what="pixels in the dtype of the tower",
    shape="[batch_size, images, …]",
    dtype="base_bytes",
    why="a variable of get_image_features holds them while the tower runs",
    source="transformers Qwen2_5_VLModel.get_image_features",
)
TOWER_NAMED = Fact(
    part="activations",
    what="what the caller of the tower holds: its last states, vectors of the images",
    shape="[patches, hidden_size of the tower], [image tokens, hidden_size]",
    dtype="stream_bytes",
    why="variables of the model's forward hold them until the last layer is done",
    source="transformers Qwen2_5_VLModel.forward, mm_encoder_outputs",
)
EMBEDDED_TEXT = Fact(
    part="activations",
    what="looked-up embeddings that wait for the vectors of the images",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="embedding_bytes",
    why="they are looked up before the tower runs",
    source="transformers Qwen2_5_VLModel.forward, inputs_embeds",
)
ATTENDED_MASK = Fact(
    part="temporary",
    what="mask of the tokens and of what they attend to of the images, while it is made",
    shape="[batch_size, 1, seq_len, vectors of the images]",
    dtype="int64, and what is made of it",
    why="it is repeated for every vector of a tile before it is narrowed",
    source="transformers _prepare_cross_attention_mask of modeling_mllama.py",
)
TOWER_FORWARD = Fact(
    part="temporary",
    what="forward of one block of the vision tower, or of its projector",
    shape="[patches, …]",
    dtype="compute_bytes",
    why="what the block that runs makes beyond what is saved",
    source="symbolic.layer, symbolic.projectors on the symbolic autograd",
)


def grid_of(tower: Tower, run: RunConfig) -> ImageGrid:
    """How each image or clip of `run` is cut. Kind: exact. Source: `Tower.grid`."""
    if tower.hears:
        return tower.grid(1, round(run.audio_seconds * SAMPLING_RATE))
    width, height = run.image_size
    return tower.limited(run.image_max_pixels)(height, width)


def layer_norm_bytes(dtypes: Dtypes) -> int:
    """One element of what a LayerNorm returns. Kind: exact.

    Source: torch 2.13 `autocast_mode.h`: `layer_norm` is in its fp32 list, but for a CPU.
    """
    return 4 if dtypes.widens_layer_norm else dtypes.stream_bytes


def tower_dtypes(tower: Tower, run: RunConfig, dtypes: Dtypes) -> Dtypes:
    """`dtypes` as the blocks of `tower` have them.

    A quantised embedding returns the fp32 of the pixels, which nothing after it narrows.
    Kind: exact. Source: transformers 5.23 `Gemma4VisionPatchEmbedder.forward`.
    """
    dtypes = replace(dtypes, padded=grid_of(tower, run).padding > 0)
    embedder = tower.embedder
    if embedder is None or not tower.rescales_pixels or not is_quantised(embedder, dtypes):
        return dtypes
    compute = dtypes.compute_bytes if dtypes.under_autocast else 4
    return replace(dtypes, stream_bytes=4, compute_bytes=compute)


@dataclass(frozen=True, kw_only=True)
class TowerForward:
    """One forward over the images of a batch.

    Args:
        targets: names of the matrices with an adapter.
        num_images: of the whole batch; may be an array, as `r` may.
    """

    tower: Tower
    run: RunConfig
    dtypes: Dtypes
    method: Method
    targets: tuple[str, ...]
    num_images: Count
    r: Count

    @cached_property
    def grid(self) -> ImageGrid:
        return grid_of(self.tower, self.run)

    @property
    def num_patches(self) -> Count:
        return self.num_images * (self.grid.crops * self.grid.patches)

    @property
    def sequences(self) -> Count:
        """Rows of patches that pass the blocks."""
        return 1 + 0 * self.num_images if self.tower.joined else self.num_images * self.grid.crops

    @property
    def span(self) -> Count:
        """Patches of one row, each of which a kernel reads."""
        return self.num_patches if self.tower.joined else self.grid.patches

    @property
    def num_vectors(self) -> Count:
        """That the language model reads."""
        return self.num_images * self.grid.vectors

    @property
    def num_projected(self) -> Count:
        """That the projector makes of the patches."""
        return self.num_images * self.projected_span

    @property
    def num_pixels(self) -> Count:
        return self.num_images * self.grid.num_pixels

    @property
    def stream(self) -> int:
        """Bytes of one element between blocks."""
        stack = self.tower.stack
        last = stack.groups[-1].layer
        return stream_bytes(last, self.dtypes, after_norm=stack.starts_in_layer_norm)

    @property
    def state_bytes(self) -> Count:
        """What one block returns."""
        return self.num_patches * self.tower.stack.hidden_size * self.stream

    @property
    def pixels(self) -> Entry:
        return Entry(PIXELS, added(self.pixel_tensors))

    @property
    def pixel_tensors(self) -> tuple[Count, Count]:
        """Bytes of the pixels and of their mask."""
        return self.num_pixels * self.pixel_bytes, self._mask_bytes

    @property
    def pixel_bytes(self) -> int:
        """Of one number of the batch: an encoder that casts nothing is given its own dtype."""
        dtypes, made = self.dtypes, self.tower.pixel_bytes
        is_given = self.tower.transcribes and not dtypes.under_autocast
        return min(made, dtypes.embedding_bytes) if is_given else made

    @property
    def narrow_pixels(self) -> Entry:
        """The same as the tower reads them, where its caller holds them."""
        return Entry(NARROW_PIXELS, added(self.narrow_tensors))

    @property
    def narrow_tensors(self) -> tuple[Count, Count]:
        """Bytes of these pixels, and of their mask or of a copy in fp32."""
        if self.tower.copies_pixels:
            size = min(self.dtypes.base_bytes, self.tower.pixel_bytes)
            return self.num_pixels * size, self._mask_bytes
        joined = self.num_pixels * self.tower.pixel_bytes * self.tower.joins_pixels
        return self.narrow_bytes * self.tower.holds_narrow, joined

    @property
    def _mask_bytes(self) -> Count:
        return 8 * self.num_images * self.grid.masked

    @property
    def narrow_bytes(self) -> Count:
        """Nothing where they are as narrow as the tower."""
        size = self.dtypes.base_bytes
        return self.num_pixels * size * (size < self.tower.pixel_bytes)

    @property
    def of_vectors(self) -> dict[str, Count]:
        """Sizes that the projector's forms are evaluated at."""
        return {"tokens": self.num_projected, "span": self.projected_span, "r": self.r}

    @property
    def projected_span(self) -> int:
        """Vectors that the projector makes of one image."""
        return self.grid.projected or self.grid.vectors

    @property
    def kept(self) -> int:
        """Vectors of one image that the last matrix reads; 0: all."""
        return self.grid.vectors * self.tower.strips

    @property
    def table_bytes(self) -> int:
        """Cosines and sines of one patch."""
        return self.tower.table_bytes + self.tower.table_width * self.stream

    @cached_property
    def working(self) -> Count:
        """Worst point of a block or of the projector, with the tables that all blocks read."""
        in_block = forward_bytes(
            self.tower.stack,
            self.dtypes,
            tokens=self.num_patches,
            span=self.span,
            targets=self.targets,
            method=self.method,
            r=self.r,
        )
        points = projector_working_points(
            self.tower, self.targets, self.dtypes, self.method, stream=self.stream, kept=self.kept
        )
        in_projector = self.named_in_projector + most(points, **self.of_vectors)
        # `forward_bytes` has one beside the input of its block
        embedded = self.state_bytes * (self.tower.num_embedded - 1)
        shared = self.num_patches * self.table_bytes + self.block_mask_bytes
        in_blocks = largest(in_block + shared + embedded, in_projector)
        return largest(in_blocks + self.held, self.embedding)

    @property
    def named_in_projector(self) -> Count:
        """What the last block returned, and what else the tower's forward names by then."""
        tower = self.tower
        if not tower.names_blocks:
            return (1 + tower.names_embedded) * self.state_bytes
        named = self.dtypes.libraries.value_of("transformers", tower.named_blocks)
        return named * self.state_bytes + self.block_mask_bytes

    @property
    def block_masks(self) -> tuple[Count, ...]:
        """Bytes of each mask that all blocks read."""
        stack = self.tower.stack
        return kept_masks(stack, self.dtypes, tokens=self.num_patches, span=self.span)

    @property
    def block_mask_bytes(self) -> Count:
        return sum(self.block_masks, 0 * self.span)

    @property
    def leaf_bytes(self) -> Count:
        """Patches as they are embedded, before anything is added to them."""
        elements = self.num_images * self.tower.named_elements
        if not self.tower.named_elements:
            elements = self.num_patches * self.tower.stack.hidden_size
        return elements * self.dtypes.compute_bytes

    @cached_property
    def held(self) -> Count:
        """What the tower's forward names until it returns: positions, and features of blocks."""
        tower = self.tower
        held = 4 * self.num_patches * tower.positions
        if tower.named_elements:
            held = held + self.leaf_bytes
        if not tower.deep:
            return held
        features = self.num_vectors * tower.stack.head_linears[-1].out_features * tower.deep
        return held + features * self.stream

    @property
    def embedding(self) -> Count:
        """Worst point while the patches are embedded."""
        narrow, wide = self.tower.embedded
        made = self.num_patches * (self.dtypes.base_bytes * narrow + 4 * wide)
        if self.tower.rescales_pixels:
            rescaled = self.tower.pixel_bytes * self.num_pixels
            read = min(self.tower.pixel_bytes, self.dtypes.base_bytes) * self.num_pixels
            return largest(2 * rescaled, made + read)
        if self.tower.names_blocks:
            made = made + self.leaf_bytes
            masking = self.state_bytes + self.leaf_bytes + 2 * self.block_mask_bytes
            return largest(made, masking)
        return made if self.tower.holds_narrow else made + self.narrow_bytes

    @property
    def result_bytes(self) -> int:
        """One element of what the tower returns."""
        if self.tower.normalises:
            return layer_norm_bytes(self.dtypes)
        if not self.tower.attended:
            return self.stream
        settings = (self.tower, self.targets, self.dtypes, self.method)
        return result_bytes(*settings, stream=self.stream)

    def attended(self, hidden_size: int) -> Entry:
        """What cross attention reads."""
        return Entry(TOWER_NAMED, self.num_vectors * hidden_size * self.result_bytes)

    def masking(self, length: Count) -> Entry:
        """The mask of `length` tokens of each row and of what they attend to, while it is made.

        Kind: exact. Source: transformers 5.23 `_prepare_cross_attention_mask`.
        """
        narrow = self.dtypes.base_bytes
        # repeated in int64; subtracted from 1, in fp32, and narrowed; a boolean, and filled in
        repeated, inverted, boolean = 8, 4, 1
        worst = inverted + narrow * (narrow < inverted), narrow + boolean + narrow
        return Entry(ATTENDED_MASK, length * self.num_vectors * (repeated + max(worst)))

    def named(self, hidden_size: int) -> Entry:
        """What the model's forward holds of the tower while the text is read."""
        size, tower, returned = self.stream, self.tower, self.result_bytes
        states = self.num_patches * tower.stack.hidden_size * returned * tower.num_returned
        # those that are wider than the text are cast
        per_element = returned + size * (tower.copies + (returned != size and not tower.attended))
        vectors = self.num_vectors * hidden_size * per_element
        # an argument of checkpointed blocks, among what they save
        is_argument = self.run.phase == "finetune" and self.run.gradient_checkpointing
        if tower.holds_mask and self.grid.padding and not is_argument:
            states = states + self.num_patches * self.grid.patches  # a byte for each pair
        if tower.returns_normed:
            width = tower.returned_width * layer_norm_bytes(self.dtypes)
            return Entry(TOWER_NAMED, states + vectors + self.num_projected * width)
        return Entry(TOWER_NAMED, states + vectors + self.num_vectors * tower.returned_width * size)
