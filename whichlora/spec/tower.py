"""What turns images or sound into vectors that the language model reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from whichlora.spec.layer import Linear, Norm
from whichlora.spec.versions import ByRelease

if TYPE_CHECKING:
    from whichlora.spec.architecture import ModelSpec

SAMPLING_RATE = 16_000  # samples of sound a second, as every processor here takes them


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
        checkpointed: by release of transformers, whether checkpointing makes its blocks again in
            the backward, as it does layers.
        named_blocks: by release of transformers, of how many blocks the tower's forward names what
            they returned, and their mask, until it returns.
        num_joined: how many of these states are joined with the last one.
        stacked: by release of transformers, how many are copied into one tensor before.
        inner_norms: between blocks.
        named_elements: of an image that it names so long: of its patches without what is added.
        block_class: of its blocks, which a user of FSDP must name: what transformers lists names
            classes that the model has not; splits_blocks: only the attention of a block is listed.
        tables: rows and columns of tables among `other_params` of `stack`, of few rows.
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
    checkpointed: ByRelease[bool] = (("0", True),)
    named_blocks: ByRelease[int] = (("0", 0),)
    num_joined: int = 0
    stacked: ByRelease[int] = (("0", 0),)
    inner_norms: tuple[Norm, ...] = ()
    named_elements: int = 0
    block_class: str = ""
    splits_blocks: bool = False
    tables: tuple[tuple[int, int], ...] = ()
    table_saved: int = 0
    wraps: tuple[str, ...] = ()
    fused_head: bool = True

    @property
    def names_blocks(self) -> bool:
        """Whether its forward names what several blocks returned."""
        return any(named for _, named in self.named_blocks)

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
