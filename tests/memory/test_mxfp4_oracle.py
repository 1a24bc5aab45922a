"""Experts in mxfp4 against the real module and the real expansion of transformers."""

from __future__ import annotations

import pytest
from devices import A100

from whichlora import families
from whichlora.memory.mxfp4 import BLOCK, expanding_bytes
from whichlora.memory.weights import linear_bytes
from whichlora.predict.resolve import resolve
from whichlora.spec.checkpoint import packed_experts
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

pytestmark = pytest.mark.oracle

RUN = RunConfig(model="openai/gpt-oss-20b", phase="inference")


def test_a_layer_of_experts_has_the_bytes_of_the_real_module() -> None:
    import torch
    from transformers import AutoConfig
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    job = resolve(load_model(RUN.model), RUN, A100)
    values = {k: v for k, v in job.model.config.items() if k != "quantization_config"}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        module = Mxfp4GptOssExperts(config)
    held = sum(parameter.nbytes for parameter in module.parameters())
    # the exponents come with the kernel's precision config, a byte for each block
    held += sum(p.numel() * 2 // 32 for p in module.parameters() if p.dtype == torch.uint8)
    experts = packed_experts(job.model)[:2]
    assert sum(linear_bytes(linear, job.dtypes) for linear in experts) == held


def test_expanding_a_parameter_peaks_where_the_real_function_does() -> None:
    import torch
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    from whichlora.profiler.cpu_peak import CpuPeak

    values = dict(load_model(RUN.model).config)
    values |= {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16}
    small = families.build(values, name="small")
    joint = packed_experts(small)[0]
    shape = (joint.count, joint.out_features, joint.in_features // BLOCK)
    blocks = torch.zeros(*shape, BLOCK // 2, dtype=torch.uint8)
    scales = torch.full(shape, 127, dtype=torch.uint8)
    meter = CpuPeak()
    meter.start()
    expanded = _convert_moe_packed_tensors(blocks, scales)
    peak = meter.stop()
    assert expanded.nbytes == 2 * joint.num_weights
    assert expanding_bytes(small, 2) + expanded.nbytes == pytest.approx(peak, rel=0.01)
