"""Drafts by a model's own layer for it (multi-token prediction): what it takes of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.serving.base import Served
from whichlora.serving.indexers import index_key_bytes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, LayerGroup

# Model types whose draft layer is one more layer, joined to the model by a matrix.
# Source: vLLM 0.33.0 config/speculative.py:733, :756 and models/deepseek_mtp.py:73.
WITH_DRAFT_LAYER = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
UNTIMED = "steps with drafts are not predicted: how many are accepted depends on the texts"

NOTE = "the layer for drafts is loaded by the engine, and counted here"

JOINT = Fact(
    part="weights",
    what="matrix and norms before a layer for drafts",
    shape="[hidden_size, 2 x hidden_size], 3 x [hidden_size]",
    dtype="compute_bytes",
    count="num_nextn_predict_layers",
    why="each GPU has it whole; table and head are those of the model",
    source="vLLM 0.33.0 model_executor/models/deepseek_mtp.py:83; "
    "v1/spec_decode/llm_base_proposer.py:1418 _maybe_share_embeddings; SGLang 0.5.23 "
    "srt/models/deepseek_nextn.py:94",
)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def num_layers(model: ModelSpec) -> int:
    """Layers of `model` that draft.

    Kind: exact. Source: vLLM 0.33.0 config/speculative.py:735, :756 num_nextn_predict_layers.
    """
    number = _text(model.config).get("num_nextn_predict_layers")
    return number if isinstance(number, int) else 0


def _draft_layer(model: ModelSpec) -> Layer:
    """The last layer that is as a draft's: with experts, and an indexer where the model has one."""
    able = [
        layer
        for layer, _ in model.layers()
        if layer.moe is not None
        and all(each.sparse is None or index_key_bytes(each) for each in layer.attentions)
    ]
    return able[-1]


def with_draft_layers(served: Served) -> Served:
    """`served` whose model has its draft layers, too: their weights and their cache.

    Their table and head are those of the model.

    Kind: exact. Source: vLLM 0.33.0 models/deepseek_mtp.py:104 mtp_block, models/deepseek_v32/
    attention.py:195 is_mtp_layer; SGLang 0.5.23 srt/model_executor/pool_configurator.py:262.
    """
    model = served.model
    drafts = LayerGroup(layer=_draft_layer(model), count=num_layers(model))
    return replace(served, model=replace(model, groups=(*model.groups, drafts)))


def joint_entry(served: Served) -> Entry:
    """What joins draft layers to the model. Kind: exact. Source: `JOINT`."""
    hidden = served.model.hidden_size
    elements = num_layers(served.model) * (2 * hidden * hidden + 3 * hidden)
    return Entry(JOINT, elements * served.dtypes.compute_bytes)


def has_draft_layer(model: ModelSpec) -> bool:
    """Whether a layer for drafts is predicted of `model`."""
    model_type = _text(model.config).get("model_type", model.model_type)
    return model_type in WITH_DRAFT_LAYER and bool(num_layers(model))


def check_drafts(served: Served, option: str, stages: int) -> None:
    """Refuse drafts of models without a layer for them.

    Args:
        option: that asks for them.

    Raises:
        ConfigError: one line.
    """
    model = served.model
    if not has_draft_layer(model):
        raise ConfigError(
            f"{option}: a layer for drafts is predicted for DeepSeek V3 and GLM-5, which "
            f"{model.name} is none of; leave it out"
        )
    if stages > 1:
        raise ConfigError(f"{option}: is not predicted beside stages of a pipeline; leave it out")
