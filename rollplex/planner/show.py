"""The tables and sentences of `rollplex plan`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rollplex.planner.calibrate import Calibration
from rollplex.planner.engine_memory import EngineMemory
from rollplex.planner.plan import Plan
from rollplex.reports.tables import amount, ledger_table, unit_for


def memory_table(plan: Plan) -> Table:
    """A row per state, a column per stage, per GPU."""
    ledger = plan.ledger
    whole = {s.name: s.bytes for s in ledger.states if s.naive}
    title = f"{plan.shape.name}: on each of {plan.place.gpus} {plan.gpu.name}"
    return ledger_table(title, ledger.planned(), {s.name: s.kind.value for s in ledger.states}, whole=whole)


def time_table(plan: Plan) -> Table:
    """Predicted seconds, against both baselines: serial with the prefix per response, and per group."""
    table = Table(title="Predicted step, seconds")
    for name in ("schedule", "step", "rollout", "hidden", "vs serial, unshared", "vs serial, shared"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    bases = [plan.times[f"serial, {kind}"].total for kind in ("unshared", "shared")]
    for name, time in plan.times.items():
        ratios = (f"{base / time.total:.2f} x" for base in bases)
        table.add_row(name, f"{time.total:.1f}", f"{time.rollout:.1f}", f"{time.hidden:.1f}", *ratios)
    return table


MEMORY_LEGEND = (
    "naive: everything on the GPU at once. Class: permanent states are the source of truth, regenerable ones copies of "
    "it; boundary states are made while the engine decodes and read later; phase-local ones go with their phase. A "
    "blank: not on the GPU in that phase."
)
TIME_LEGEND = (
    "shared: trainer and reference compute a prompt's prefix once per group, not once per response (unshared). hidden: "
    "training done while the engine decodes. vs serial: times as fast as the serial schedule, which trains after the "
    "rollout."
)


def show_plan(plan: Plan, console: Console) -> None:
    """Every size in the table's unit; "naive" is the sum of all states, as if all were there at once."""
    if plan.first_assumed:
        console.print(f"assumed, because neither the config nor a flag says it: {plan.first_assumed}")
    console.print(memory_table(plan))
    console.print(MEMORY_LEGEND)
    totals = plan.ledger.planned_totals()
    naive = plan.ledger.naive_total()
    unit = unit_for(max([*totals.values(), naive]))
    room, peak = (amount(size, unit) for size in (plan.gpu.memory, max(totals.values())))
    _show_residency(plan, console, unit)
    as_planned = "by phase" if plan.run is None else "as configured"
    if plan.changes == []:
        console.print(f"{as_planned} it fits: peak {peak} of {room}")
    elif plan.changes is None:
        advice = "no knob of one node helps: use a smaller model or a larger GPU"
        if plan.run is not None:
            advice = "no setting helps here: use more devices (rollplex_zero2), lora, a smaller model or a larger GPU"
        console.print(f"{as_planned} it does not fit: peak {peak} of {room}, and {advice}")
    else:
        changes = ", ".join(plan.advice or [])
        console.print(f"{as_planned} it does not fit: peak {peak} of {room}; it does with {changes}")
    if plan.engine is not None:
        _show_engine(plan.engine, plan.gpu.memory, console)
    elif plan.run is None:
        facts = plan.to_dict()
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in facts["layout"].items())
        console.print(
            f"weights shared from train TP {plan.place.train_tp} to rollout TP {plan.place.rollout_tp}: {shares}; "
            f"{facts['rebuilt_gib']:.2f} GiB rebuilt, where a second copy takes {facts['second_copy_gib']:.2f}"
        )
    if plan.times:
        console.print(time_table(plan))
        console.print(TIME_LEGEND)
    if plan.assumptions:
        console.print("assumed: " + "; ".join(plan.assumptions))


def _show_engine(engine: EngineMemory, room: float, console: Console) -> None:
    """What the engine's own GPUs hold, all phases alike."""
    unit = unit_for(max(engine.total, 1.0))
    weights, pool, total, most = (amount(x, unit) for x in (engine.weights, engine.pool, engine.total, room))
    fits = "it fits" if engine.total <= room else (
        "it does not fit: set the engine's kv_cache_memory_bytes or max_num_seqs lower, or tensor_parallel_size higher"
    )  # fmt: skip
    console.print(
        f"the engine has GPUs of its own ({engine.engines} x {engine.gpus}, besides the trainer's). Each holds weights "
        f"{weights} and K/V pool {pool}: {total} of {most}, {fits}"
    )


def _show_residency(plan: Plan, console: Console, unit: tuple[int, str]) -> None:
    """What leaves the device and what stays, in this plan and in what this version does."""
    naive, room = plan.ledger.naive_total(), plan.gpu.memory
    whole = "fits" if naive <= room else "does not fit"
    console.print(f"everything resident at once (naive) {whole}: {amount(naive, unit)} of {amount(room, unit)}")
    if plan.run is None:
        shared = "" if plan.engine is not None else ", and trainer and engine share one copy of the weights"
        console.print(
            f"By phase: what a phase does not need has left the device, as the callback PhaseOffload does it{shared}."
        )
        if plan.place.train_tp > 1:
            console.print(
                "With train TP above 1 this version keeps embeddings, head and vision tower whole on each GPU; the "
                "plan splits embeddings and head."
            )
        return
    if plan.run.offload:
        console.print(
            f"PhaseOffload: {', '.join(plan.run.offload)} leave the device where they are not needed; without it the "
            f"peak is {amount(plan.without_offload or 0.0, unit)}"
        )
    else:
        console.print("Without the callback PhaseOffload nothing leaves the device before its last use")


def show_calibration(found: Calibration, console: Console) -> None:
    """What was measured, and how well the simulation meets the recorded steps."""
    table = Table(title="Measured, alone and beside the other lane")
    for name in ("what", "count", "alone, ms", "beside, ms"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, row in found.measured.items():
        alone, beside = (f"{1e3 * x:.2f}" if x is not None else "" for x in (row.alone, row.beside))
        table.add_row(name, str(row.count), alone, beside)
    console.print(table)
    console.print(f"alpha {found.shown('alpha')}, r {found.shown('r')}, update and publish {found.update:.3f} s")
    steps = Table(title="The recorded steps, simulated with these")
    for name in ("step", "schedule", "recorded, s", "predicted, s", "error", "rollout recorded", "rollout predicted"):
        steps.add_column(name, justify="left" if name == "schedule" else "right")
    for s in found.steps:
        steps.add_row(
            s.name, s.schedule, f"{s.recorded:.3f}", f"{s.predicted:.3f}", f"{100 * s.error:+.1f} %",
            f"{s.rollout_recorded:.3f}", f"{s.rollout_predicted:.3f}",
        )  # fmt: skip
    console.print(steps)
    others = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.schedules.items())
    console.print(f"the mean recorded step under each schedule: {others}")
    if found.logged is not None:
        console.print(f"mean of time/step in the run's metrics: {found.logged:.3f} s")
