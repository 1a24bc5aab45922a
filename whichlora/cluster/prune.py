"""Every candidate on every GPU type, as judged now, and which of them are worth a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.state import Sweep
from whichlora.cluster.tasks import find_records, read_start
from whichlora.errors import ConfigError
from whichlora.search.acquisition import Decision, Spent, exhausted
from whichlora.search.feasibility import MIN_CHANCE, Candidate
from whichlora.search.loop import SearchLoop
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import Budget, Plan, ProfilePolicy
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.workflow.session import Progress, Session
from whichlora.workflow.training_data import Counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Where the search stands on the GPUs of one group.

    Args:
        candidates: of both stages, in the order of `search_loop`.
    """

    group: GpuGroup
    session: Session
    search_loop: SearchLoop
    decision: Decision
    candidates: Sequence[Candidate]


def judge_groups(plan: Plan, sweep: Sweep, progress: Progress) -> list[Judged]:
    """Every group in the light of all records of its tasks.

    The group's accelerator is what the drivers on its nodes said; before the first task ran, what
    its type and features say. A group whose nodes differ is judged once for each kind.

    Raises:
        ConfigError: no group runs any candidate.
    """
    lengths: Counted = {}
    judged: list[Judged] = []
    refusals: list[ConfigError] = []
    for group in sweep.groups:
        folder = sweep.run_dir / group.name
        for key in _met(sweep, group) or [group.gpu]:
            gpu = find_gpu(key)
            try:
                group_plan = replace(_on_group(plan, group), output_dir=folder, gpu=key)
                session = Session(group_plan, gpu, progress, fresh=False, lengths=lengths)
                runs = session.runs()
            except ConfigError as fault:  # the other groups may run what this one refuses
                error = _or_another(fault, group)
                refusals.append(error)
                progress.say(f"{group.name} left out: {error}")
                continue
            search_loop = session.search_loop(runs)
            _, refused = session.recall(search_loop)
            for difference, number in refused.items():
                progress.say(
                    f"{group.name}: {number} measured before {difference}, and not reused; "
                    "measure again with --fresh"
                )
            if judged and judged[-1].group.name == group.name:  # its files lie beside the first's
                session.plan = replace(group_plan, output_dir=folder / key)
            judged.append(
                Judged(
                    group=replace(group, gpu=key),
                    session=session,
                    search_loop=search_loop,
                    decision=search_loop.decide(),
                    candidates=session.candidates(search_loop),
                )
            )
    if refusals and not judged:
        raise refusals[0]
    return judged


def _on_group(plan: Plan, group: GpuGroup) -> Plan:
    """`plan` without the spreads that need more GPUs on a node, or more nodes, than there are.

    Raises:
        ConfigError: none is left.
    """
    over_nodes = (_over_nodes(config, group) for config in plan.spreads)
    spreads = tuple(config for config in over_nodes if config.is_one_device or group.has(config))
    if not spreads:
        raise ConfigError(
            f"gpus: the plan needs more than the {group.most_on_a_node} on each of "
            f"{group.num_nodes} nodes"
        )
    return replace(plan, spreads=spreads)


def _over_nodes(config: ParallelConfig, group: GpuGroup) -> ParallelConfig:
    """`config` over the fewest equal nodes of `group` that hold its GPUs, where one does not."""
    most = group.most_on_a_node
    if config.nodes > 1 or config.gpus <= most:
        return config
    numbers = (n for n in range(2, group.num_nodes + 1) if config.gpus % n == 0)
    return replace(config, nodes=next((n for n in numbers if config.gpus <= n * most), 1))


def _or_another(error: ConfigError, group: GpuGroup) -> ConfigError:
    """`error` of a group whose GPUs may be others, with where to name them."""
    if not group.others:
        return error
    kind = group.gres_type or "FEATURE"
    return ConfigError(
        f"{error}; {group.name} is taken for {group.gpu} and may be {', '.join(group.others)}: "
        f"name it, as slurm.gpus: {{{kind}: {group.others[0]}}}"
    )


def _met(sweep: Sweep, group: GpuGroup) -> list[str]:
    """Keys of the accelerators that tasks of a group have met, in their order.

    A task says so as it starts; of one that ran on another file system only the record is here.
    """
    files = sorted((sweep.run_dir / group.name / "started").glob("*.json"))
    keys = [str(read_start(path)["gpu"]) for path in files]
    for array in sweep.arrays:
        if array.group == group.name:
            keys += [record.gpu for record in find_records(sweep.tasks(array)).values()]
    return list(dict.fromkeys(keys))


def worth_profiling(
    candidates: Sequence[Candidate], decision: Decision, policy: ProfilePolicy, budget: Budget
) -> list[Candidate]:
    """Candidates whose runs could change the answer, all at once: an array has no second look.

    Those that win in most of the posterior samples, until what is left out wins in no more of them
    than the asked confidence allows; and before the first of each form in which a model is served
    what shows that it serves.
    Where results reopen the question, the next round asks for more.

    Returns:
        The most telling first, so that a budget may cut the list anywhere.
    """
    if policy == "none":
        return []
    if policy == "all":
        return [
            candidate
            for candidate in candidates
            if not candidate.measured and not candidate.failure
        ]
    doubt, chosen = 1 - decision.confidence, list[Candidate]()
    forms: set[RunConfig | None] = set()
    for position in decision.chance_to_win.argsort()[::-1].tolist():
        wins = float(decision.chance_to_win[position])
        if wins <= 0 or doubt <= 1 - budget.confidence:
            break
        doubt -= wins
        form = candidates[position].form
        if form not in forms:
            forms.add(form)
            chosen += _serving(form, candidates, decision)
        if not candidates[position].measured:
            chosen.append(candidates[position])
    return chosen


def affordable(judged: Judged, plan: Plan, listed: Collection[RunConfig]) -> list[Candidate]:
    """What is worth profiling and was not listed before, as far as the budget reaches.

    The budget is that of one GPU type, and as on one machine the run that uses it up is still
    made. `profile: all` knows none.
    """
    chosen = [
        candidate
        for candidate in worth_profiling(
            judged.candidates, judged.decision, plan.profile, plan.budget
        )
        if candidate.run not in listed
    ]
    if plan.profile == "all":
        return chosen
    spent, expected_s = spent_on(judged, listed), _expected_s(judged)
    for number, candidate in enumerate(chosen):
        if exhausted(spent, plan.budget):
            return chosen[:number]
        spent.runs += 1
        spent.device_s += expected_s[candidate.run]
    return chosen


def spent_on(judged: Judged, listed: Collection[RunConfig]) -> Spent:
    """What the runs that were listed for a group cost.

    A run without a device time of its own counts as expected: it is not back yet, or the cluster
    ended it.
    """
    expected_s = _expected_s(judged)
    measured = {
        judged.search_loop.runs[i]: result for i, result in judged.search_loop.measured.items()
    }
    device_s = 0.0
    for run in listed:
        measured_s = measured[run].device_s if run in measured else 0.0
        device_s += measured_s or expected_s.get(run, 0.0)
    return Spent(runs=len(listed), device_s=device_s)


def _expected_s(judged: Judged) -> dict[RunConfig, float]:
    """Device seconds that profiling each candidate should take."""
    search_loop = judged.search_loop
    expected_s = search_loop.candidate_posterior.run_s(search_loop.calibration).tolist()
    return dict(zip(search_loop.runs, expected_s, strict=True))


def _serving(
    form: RunConfig | None, candidates: Sequence[Candidate], decision: Decision
) -> list[Candidate]:
    """The shape that surely serves within the limits, or else every one that may."""
    shapes = [
        (float(decision.chance_to_meet[position]), position)
        for position, candidate in enumerate(candidates)
        if candidate.run.phase == "inference" and candidate.form == form
    ]
    if any(candidates[i].measured and candidates[i].verdict == "meets" for _, i in shapes):
        return []
    open_shapes = [(c, i) for c, i in shapes if c >= MIN_CHANCE and not candidates[i].measured]
    if open_shapes and max(open_shapes)[0] >= 1 - MIN_CHANCE:
        open_shapes = [max(open_shapes)]
    return [candidates[position] for _, position in open_shapes]
