"""What the images of a batch do in a vision tower: the counts of `timing.work`."""

from __future__ import annotations

from whichlora.memory.images import TowerStep
from whichlora.memory.towers import TowerForward
from whichlora.spec.layer import LayerGroup
from whichlora.spec.numeric import Count, ceil_div, smallest
from whichlora.timing.chip import UNKNOWN_CHIP, Chip
from whichlora.timing.running import RunningModel
from whichlora.timing.serving_work import served_layers
from whichlora.timing.training_work import trained_layers
from whichlora.timing.work import BACKWARD_RATIO, Work, product_work

ATTENTION_OPS = 4  # kernels of one call: slices laid out, and the attention


def _segment(group: LayerGroup, span: Count) -> Count:
    """Patches that one call of the attention sees: of a row of them, or of a window."""
    of_window = max(attention.segment for attention in group.layer.attentions)
    return smallest(span, of_window) if of_window else span


def _packed_launches(group: LayerGroup, num_patches: Count, span: Count) -> Count:
    """Kernels beyond those of one call, where Python calls the attention for each segment."""
    if not any(attention.packed for attention in group.layer.attentions):
        return 0 * num_patches
    calls = ceil_div(num_patches, _segment(group, span))
    return group.count * ATTENTION_OPS * (calls - 1)


def _around_flops(tower: TowerForward) -> Count:
    """Products of the kernel that embeds the patches, and of the projector, in one forward."""
    stack = tower.tower.stack
    behind = stack.head_linears[1:] if tower.tower.unfolds else stack.head_linears
    in_projector = sum(linear.num_weights for linear in behind)
    embedded = tower.num_pixels * stack.hidden_size
    if tower.tower.embedding_weights:
        embedded = tower.num_patches * tower.tower.embedding_weights
    return 2 * (embedded + tower.num_vectors * in_projector)


def tower_forward_work(tower: TowerForward, *, chip: Chip = UNKNOWN_CHIP) -> Work:
    """One forward over the images of a batch, without a graph.

    Kind: estimate. Source: `timing.work.served_layers`; the real edges of windows are left out.
    """
    span, num_patches = tower.span, tower.num_patches
    running = RunningModel(
        model=tower.tower.stack,
        run=tower.run,
        dtypes=tower.dtypes,
        method=tower.method,
        targets=tower.targets,
        r=tower.r,
        chip=chip,
    )
    works = []
    for group in tower.tower.stack.groups:
        segment = _segment(group, span)
        served = served_layers(
            group, running, batch_size=num_patches / segment, context=segment, decoding=False
        )
        packed = Work(launches=_packed_launches(group, num_patches, span))
        works += [served, packed]
    return Work.total((*works, Work(product_flops=_around_flops(tower))))


def tower_step_work(step: TowerStep, *, text_tokens: Count, chip: Chip = UNKNOWN_CHIP) -> Work:
    """One optimizer step's images: forward, and backward where the tower has a graph.

    Args:
        text_tokens: of a micro-step, by which `training_work` multiplies every adapter.

    Kind: estimate. Source: `timing.work.trained_layers`.
    """
    micro_steps = step.run.gradient_accumulation_steps
    recompute = int(bool(step.run.gradient_checkpointing))
    adapters: Count = 0 * step.r
    if not step.method.trains_base:
        for linear in step.tower.linears:
            if linear.rank_multiple and linear.name in step.targets:
                adapters = adapters + step.method.adapter_params(linear, step.r)
    num_patches = step.tokens
    # each adapter of the tower is multiplied with patches, not with the tokens of the text
    moved = product_work(
        (6 + 2 * recompute) * (num_patches - text_tokens) * adapters,
        wide=step.dtypes.widens_adapters,
    )
    if not step.goes_backward:
        forward = tower_forward_work(step.forward, chip=chip)
        return Work.total((forward, moved)).times(micro_steps)
    running = RunningModel(
        model=step.model,
        run=step.run,
        dtypes=step.dtypes,
        method=step.method,
        targets=step.targets,
        r=step.r,
        chip=chip,
    )
    works = []
    for group in step.model.groups:
        work = trained_layers(
            group.layer,
            group.count,
            running,
            tokens=num_patches,
            seq_len=_segment(group, step.forward.span),
        )
        launches = _packed_launches(group, num_patches, step.forward.span)
        packed = Work(
            launches=launches * (1 + recompute),
            recorded_launches=launches * (1 + recompute),
            autograd_launches=launches * BACKWARD_RATIO,
        )
        works += [work, packed]
    around = _around_flops(step.forward) * (3 if step.trains else 2)
    return Work.total((*works, Work(product_flops=around), moved)).times(micro_steps)
