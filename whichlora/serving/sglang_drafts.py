"""How SGLang drafts tokens, and what its share of a GPU leaves for that."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry
from whichlora.serving.base import Served
from whichlora.serving.drafted import DraftedBy, Drafts
from whichlora.serving.drafts import copied_entry, draft_entries, has_draft_layer, with_drafts
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import OptionValue

DRAFTS, DRAFTER = "speculative_algorithm", "speculative_draft_model_path"
STEPS, CHOICES, QUERIES = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
ALGORITHMS = ("EAGLE", "NEXTN", "EAGLE3", "STANDALONE", "NGRAM")
OF_LAYER = ("EAGLE", "NEXTN")
OTHER_MODELS: dict[str, DraftedBy] = {"EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "model"}
# The first release whose pool leaves room for what drafts; before, a default share is smaller by
# these GiB, of a model of its own and of others. Source: github.com/sgl-project/sglang/pull/23862,
# and srt/server_args.py of 0.4.9, 0.5.4, 0.5.10 and 0.5.13.
COUNTED_SINCE = "0.5.14"
_RESERVED_GIB = (("0", (0, 0)), ("0.4.8", (2, 2)), ("0.5.3", (6, 2)), ("0.5.10", (6, 4)))
# Passes of what drafts, and tokens that a step verifies, where nothing is stated. Source:
# `auto_choose_speculative_params`, 0.5.23 srt/arg_groups/speculative_hook.py:1438; srt/server_args
# of 0.4.9 and 0.5.4.
_USUAL, _USUAL_OF_LLAMA = (3, 4), (5, 8)
LLAMA_ALONE_SINCE = "0.5.8"
_NGRAM_QUERIES = 12  # speculative_ngram_max_match_window_size


def asked_drafts(served: Served) -> Drafts | None:
    """How tokens are drafted; None where they are not. Kind: exact. Source: `_USUAL`."""
    algorithm = served.options[DRAFTS]
    if algorithm is None:
        return None
    by = _drafted_by(str(algorithm), served.model)
    model = served.model
    is_llama = model.model_type == "llama" or (
        by != "layer" and served.libraries.older("sglang", LLAMA_ALONE_SINCE)
    )
    passes, queries = _USUAL_OF_LLAMA if is_llama else _USUAL
    if (steps := served.count(STEPS)) is not None:
        passes, queries = steps, steps + 1
    queries = served.count(QUERIES) or (_NGRAM_QUERIES if by == "text" else queries)
    return Drafts(by=by, tokens=queries - 1, passes=0 if by == "text" else passes, queries=queries)


def _drafted_by(algorithm: str, model: ModelSpec) -> DraftedBy:
    if algorithm == "NGRAM":
        return "text"
    if algorithm in OF_LAYER and (algorithm == "NEXTN" or has_draft_layer(model)):
        return "layer"
    return OTHER_MODELS[algorithm]


def has_drafts(model: ModelSpec, options: Mapping[str, OptionValue]) -> bool:
    """Whether the drafts that `options` ask for are predicted of `model`."""
    algorithm = str(options[DRAFTS])
    if algorithm not in ALGORITHMS:
        return False
    return has_draft_layer(model) or algorithm == "NGRAM" or bool(drafter_of(options))


def drafter_of(options: Mapping[str, OptionValue]) -> str:
    """The model that drafts, where it is another one."""
    algorithm = str(options.get(DRAFTS, ""))
    return str(options.get(DRAFTER, "")) if algorithm in OTHER_MODELS else ""


def counts_drafts(served: Served) -> bool:
    """Whether the pool leaves room for what drafts. Kind: exact. Source: `COUNTED_SINCE`."""
    return not served.libraries.older("sglang", COUNTED_SINCE)


def pooled(served: Served) -> Served:
    """`served` whose model has the layers for which the pool has room."""
    return with_drafts(served, asked_drafts(served) if counts_drafts(served) else None)


def held_entries(served: Served, ranks: int) -> list[Entry]:
    """What drafts beside its layers, when the pool is sized.

    Kind: exact. Source: as of `draft_entries`, `copied_entry`.

    Args:
        ranks: GPUs that share every matrix.
    """
    drafts = asked_drafts(served)
    if drafts is None or not counts_drafts(served):
        return []
    entries = draft_entries(served, drafts, ranks)
    return [*entries, copied_entry(served, ranks)] if drafts.by == "layer" else entries


def reserved_gib(served: Served) -> int:
    """What a default share leaves for drafts. Kind: exact. Source: `_RESERVED_GIB`."""
    drafts = asked_drafts(served)
    if drafts is None or drafts.by == "text" or counts_drafts(served):
        return 0
    of_model, of_others = served.libraries.value_of("sglang", _RESERVED_GIB)
    return int(of_model if drafts.by == "model" else of_others)


def check_choices(served: Served) -> None:
    """Refuse trees of drafts, whose branches are not predicted.

    Raises:
        ConfigError: one line.
    """
    drafts, topk = asked_drafts(served), served.count(CHOICES) or 1
    if drafts is not None and topk > 1 and served.count(QUERIES) is None:
        raise ConfigError(
            f"{CHOICES}: {topk} makes a tree of drafts; give {QUERIES}, too, of which a step "
            "verifies so many"
        )
