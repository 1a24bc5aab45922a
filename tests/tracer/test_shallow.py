"""A config with fewer layers is one that its class accepts."""

import pytest

from whichlora import families
from whichlora.store.hub import load_model
from whichlora.tracer.extrapolate import shallow


@pytest.mark.parametrize(
    ("name", "layers", "sharing"),
    [("google/gemma-4-E2B", 6, 0), ("google/gemma-4-E2B", 17, 2), ("google/gemma-4-31B", 6, 0)],
)
def test_the_first_layers_keep_their_own_keys(name: str, layers: int, sharing: int) -> None:
    """E2B has 35 layers, of which the last 20 read the keys of earlier ones."""
    config = shallow(load_model(name).config, layers)
    assert config["text_config"]["num_kv_shared_layers"] == sharing
    assert families.build(config, name=name).num_hidden_layers == layers


def test_layers_are_counted_by_their_kinds_where_no_field_does() -> None:
    name = "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"
    config = shallow(load_model(name).config, 8)
    assert families.build(config, name=name).num_hidden_layers == 8
