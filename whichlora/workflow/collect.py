"""`whichlora calibrate --measure`: measure the runs that tell most about a config's candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

from whichlora.calibration.database import Refit, calibrate
from whichlora.calibration.design import Option, PredictedTime, choose
from whichlora.calibration.load import load_calibration
from whichlora.config import load_plan
from whichlora.predict.predict import predict
from whichlora.predict.quantities import forward_features, mean_context, step_features
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.profile_steps import steps_by_length
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.host import read_host, write_host
from whichlora.store.locks import hold_folder
from whichlora.timing.model import seconds
from whichlora.workflow.launch import measure_launch
from whichlora.workflow.profiling import device_of, gpu_of, require_profiler
from whichlora.workflow.session import Progress, Session

START_S = 10.0  # guess of what building a model takes, until one was built here


def measure(config: Path, *, budget_s: float, progress: Progress) -> Refit:
    """Measure candidates of `config`, one at a time, until the budget is spent or none tells more.

    After each the predictors are fitted anew, so that the next choice uses it.

    Args:
        budget_s: device time.

    Raises:
        ConfigError: a fault in the config, the data, a model or the device.
        CalibrationError: nothing was measured, and nothing was before.
    """
    plan = load_plan(config)
    gpu = gpu_of(plan)
    device_of(gpu)
    require_profiler(plan.finetune)
    # a folder of its own: `run.json` beside it is what a later `whichlora run` goes on from
    # it profiles on one GPU, which tells what the ranks of several compute, too
    plan = replace(plan, output_dir=plan.output_dir / "calibrate", spreads=(ONE_GPU,))
    with hold_folder(plan.output_dir):
        session = Session(plan, gpu, progress, fresh=True)
        try:
            _learn_launch(session)
            _spend(session, budget_s)
        finally:
            session.close()
    return calibrate(gpu, plan.calibration_dir)


def _learn_launch(session: Session) -> None:
    """Keep what a launch takes on this host, which no folder says yet."""
    root, key = session.roots[0], session.gpu.key
    if read_host(root, key) is not None:
        return
    host = measure_launch(session.profiler(), session.gpu)
    if host is None:
        session.progress.say("a launch could not be measured: it stays that of the calibration")
        return
    write_host(root, key, host)
    session.calibration = load_calibration(session.gpu, session.plan.calibration_dir)
    session.progress.say(f"a launch takes {1e6 * host.launch_s:.3g} µs on this host")


def _spend(session: Session, budget_s: float) -> None:
    alive = [run for run in session.measurable_runs() if _may_fit(session, run)]
    predicted_times = {run: _predicted_times(session, run) for run in alive}
    targets = [predicted_time for some in predicted_times.values() for predicted_time in some]
    search_loop = session.search_loop(alive)
    left_s, starts_s = budget_s, [START_S]
    device = session.gpu.backend.torch_device
    while True:
        open_positions = [i for i in range(len(alive)) if i not in search_loop.measured]
        options = [
            Option(
                predicted_times[alive[i]],
                mean(starts_s) + _timed_s(session, predicted_times[alive[i]], alive[i]),
            )
            for i in open_positions
        ]
        chosen = choose(options, targets, session.calibration.time, budget_s=left_s)
        if chosen is None:
            reason = "the budget is spent" if left_s < budget_s / 10 else "no run tells more"
            session.progress.say(f"{reason}: {budget_s - left_s:.0f} s of {budget_s:.0f} s used")
            return
        position = open_positions[chosen]
        measurement = session.measure(search_loop, position, None)
        search_loop.measured[position] = measurement
        left_s -= measurement.device_s
        if measurement.outcome == "ok":
            built_s = max(0.0, measurement.device_s - _measured_s(measurement, device))
            starts_s = [*starts_s, built_s] if len(search_loop.measured) > 1 else [built_s]
        session.learn(measurement)


def _may_fit(session: Session, run: RunConfig) -> bool:
    model = session.models[run.model]
    return predict(model, run, session.gpu, session.calibration).verdict != "fails"


def _predicted_times(session: Session, run: RunConfig) -> tuple[PredictedTime, ...]:
    """The times that a profile of `run` shows: every width, or prompt pass and decoding step.

    An encoder or a model of rewards decodes nothing.
    """
    job = session.job(run)
    if run.phase == "finetune":
        load = session.workload(run)
        widths = dict.fromkeys(load.profile_lengths(session.plan.num_batches))
        return tuple(
            PredictedTime("finetune", step_features(job, seq_len=width)) for width in widths
        )
    prompt = PredictedTime("prefill", forward_features(job, context=run.prompt_len, decoding=False))
    if not job.model.can_generate:
        return (prompt,)
    context = mean_context(run.prompt_len, run.max_new_tokens)
    return prompt, PredictedTime("decode", forward_features(job, context=context, decoding=True))


def _timed_s(session: Session, predicted_times: tuple[PredictedTime, ...], run: RunConfig) -> float:
    """Predicted device time of a profile, building left out."""
    models, plan = session.calibration.time, session.plan
    device = session.gpu.backend.torch_device
    each = [
        float(seconds(models[predicted_time.phase], predicted_time.features)[0])
        for predicted_time in predicted_times
    ]
    if run.phase == "finetune":
        lengths = session.workload(run).profile_lengths(plan.num_batches)
        of_length = dict(zip(dict.fromkeys(lengths), each, strict=True))
        steps = steps_by_length(lengths, device)
        return sum(number * of_length[length] for length, number in steps.items())
    prompt_s, *token_s = each
    whole = prompt_s + (run.max_new_tokens - 1) * sum(token_s)
    return steps_by_length([run.prompt_len] * plan.num_runs, device).total() * whole


def _measured_s(measurement: Measurement, device: str) -> float:
    """Of its steps or generations, those that are not timed as long as the others."""
    timed = measurement.step_s or measurement.generate_s
    lengths = measurement.step_lengths if measurement.step_s else [1] * len(timed)
    return steps_by_length(lengths, device).total() * mean(timed)
