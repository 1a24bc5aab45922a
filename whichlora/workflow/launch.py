"""What a kernel costs this host: a small model decodes, and the device waits for launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whichlora.families import build
from whichlora.predict.quantities import forward_features, mean_context
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.host import Host

if TYPE_CHECKING:
    from whichlora.profiler.profile import Profiler

# So narrow that a kernel takes no time, and so deep that layers outweigh what is around them.
MODEL_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
RUN = RunConfig(
    model="launch-probe",
    phase="inference",
    precision="fp32",
    batch_size=1,
    prompt_len=8,
    max_new_tokens=25,
)
NUM_GENERATIONS = 3
TIMEOUT_S = 120.0


def measure_launch(profiler: Profiler, gpu: GpuSpec) -> Host | None:
    """Seconds of a decoding step of a small model, over its launches; None where it failed.

    About a second on the device. Generation's own Python is in it, as it is in a large model's. The
    fastest generation counts, since others may have shared the cores with another program.
    """
    measurement = profiler.measure(
        RUN,
        model_config=MODEL_CONFIG,
        target_modules=(),
        seq_lens=(RUN.prompt_len,) * NUM_GENERATIONS,
        num_batches=NUM_GENERATIONS,
        timeout_s=TIMEOUT_S,
    )
    if measurement.outcome != "ok" or not measurement.decode_s_per_token:
        return None
    job = resolve(build(MODEL_CONFIG, name=RUN.model), RUN, gpu)
    context = mean_context(RUN.prompt_len, RUN.max_new_tokens)
    launches = forward_features(job, context=context, decoding=True)["launch"]
    return Host(
        launch_s=min(measurement.decode_s_per_token) / launches,
        date=measurement.date,
        environment=measurement.environment,
    )
