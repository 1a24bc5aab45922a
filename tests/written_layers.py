"""The worst points of one layer, without checkpointing unless told."""

from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.layer import Layer
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model
from whichlora.symbolic.layer import LayerPoints, layer_points


def points_of(run: RunConfig, *, group: int, checkpointed: bool = False) -> LayerPoints:
    """Points of the layers in `group` of the model of `run`, on an H100."""
    model = find_model(run.model)
    assert model is not None
    job = resolve(model, run, find_gpu("h100-sxm-80gb"))
    return points_of_layer(job.model.groups[group].layer, job, checkpointed=checkpointed)


def points_of_layer(
    layer: Layer, job: ResolvedRun, *, masked: bool = False, checkpointed: bool = False
) -> LayerPoints:
    """Points of `layer` as `job` runs it."""
    return layer_points(
        layer,
        job.model.stream_width,
        job.targets,
        job.dtypes,
        job.method,
        masked=masked,
        accumulated=False,
        reentrant=False,
        checkpointed=checkpointed,
        stream=job.dtypes.stream_bytes,
    )
