"""Seconds per GRPO step: Rollplex's schedules against each other and against TRL, on the same work.

    python scripts/bench_step.py --model small --visual-tokens 500 --G 8 --B 4
    python scripts/bench_step.py --workload lognormal --repeats 10 --json runs/bench/lognormal.json
    python scripts/bench_step.py --list-workloads

Each contender is a process that builds its model and trainer once. The parent asks them for one step in turn
(A B C A B C ...), so drift of the machine meets all alike; in between they sleep on a pipe. What is compared is the
ratio within a round. docs/benchmarks.md says how each figure is measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.gate import Missing
from bench.report import ratios, show, summary
from bench.worker import OURS, QUIET, REMOTE, TRL, Contender, ContenderError, environment
from bench.workload import MODELS, WORKLOADS, Workload, model_folder

ROOT = Path(__file__).resolve().parent.parent
EVERYBODY = (*OURS, *REMOTE, *TRL)
PLACEMENTS = {
    "colocated": (*OURS, *TRL),
    "disaggregated": REMOTE,
    "both": ("serial", "overlap", "overlap_streaming", "disaggregated"),
}
CHECK: dict[str, Any] = dict(model="tiny", visual_tokens=16, G=2, B=2, R=4)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workload", choices=WORKLOADS, default="main", help="a named workload; other options change it")
    p.add_argument("--model", choices=MODELS)
    p.add_argument("--visual-tokens", type=int, help="of each prompt's picture")
    p.add_argument("--G", type=int, help="responses per prompt")
    p.add_argument("--B", type=int, help="prompts per step")
    p.add_argument("--R", type=int, help="response tokens, with fixed lengths")
    p.add_argument("--lengths", choices=("fixed", "lognormal"))
    p.add_argument("--sigma", type=float, help="of the lognormal lengths")
    p.add_argument("--mean", type=float, help="of the lognormal lengths")
    p.add_argument("--beta", type=float, help="weight of the KL term; above 0 a reference model scores")
    p.add_argument("--learning-rate", type=float)
    p.add_argument("--seed", type=int)
    p.add_argument("--contenders", nargs="+", choices=EVERYBODY, metavar="NAME", help=" ".join(EVERYBODY))
    p.add_argument("--placement", choices=PLACEMENTS, default="colocated",
                   help="contenders, where --contenders names none: both compares the two placements")  # fmt: skip
    p.add_argument("--repeats", type=int, default=5, help="measured rounds")
    p.add_argument("--warmup", type=int, default=1, help="rounds before, not counted")
    p.add_argument("--wait-quiet", type=float, default=0.0, metavar="MINUTES",
                   help="before each step wait up to this long until others take under 0.1 CPUs")  # fmt: skip
    p.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="Rollplex's rollout engine")
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="of a contender that runs one thing at a time")
    p.add_argument("--rollout-threads", type=int, help="of the rollout lane beside the train lane")
    p.add_argument("--train-threads", type=int, help="of the train lane beside the rollout lane")
    p.add_argument("--admission", choices=("measure", "always"), help="always: overlap also where it does not pay")
    p.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="more settings of GRPOModule, as JSON")
    p.add_argument("--json", type=Path, help="write everything that was measured to this file")
    p.add_argument("--models", type=Path, default=ROOT / "models", help="folder in which the models are kept")
    p.add_argument("--logs", type=Path, help="folder for the contenders' output; default: a temporary one")
    p.add_argument("--check", action="store_true", help="a round of a tiny workload, only to see that all works")
    p.add_argument("--list-workloads", action="store_true")
    return p


def workload_of(arguments: argparse.Namespace) -> Workload:
    changes = CHECK if arguments.check else WORKLOADS[arguments.workload][1]
    given = {f.name: getattr(arguments, f.name) for f in fields(Workload)}
    return Workload(**{**changes, **{k: v for k, v in given.items() if v is not None}})


def settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE with a JSON value."""
    out = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: write NAME=VALUE")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"--set {pair}: {value!r} is not JSON (strings need quotes)") from None
    return out


def machine() -> dict[str, Any]:
    packages = ("torch", "transformers", "lightning", "rollplex", "trl")
    return {"cpus": os.cpu_count(), "cpu": cpu_name(), **{name: version(name) for name in packages}}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def busy_seconds() -> float:
    """CPU seconds that the whole machine has worked since it started; 0 where that cannot be read."""
    try:
        user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except (OSError, ValueError):
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def wait_quiet(seconds: float) -> None:
    """Return when the machine has been idle for two seconds (the contenders sleep now), or after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(2.0)
        if busy_seconds() - before < 0.2:
            return


def run_round(contenders: Sequence[Contender], patience: float) -> dict[str, Any]:
    """One step of each, in turn, each after `wait_quiet(patience)`. "others" is what other processes took meanwhile."""
    load, steps = os.getloadavg()[0], {}
    for contender in contenders:
        wait_quiet(patience)
        busy, begin = busy_seconds(), time.perf_counter()
        step = contender.step()
        step["others"] = max(0.0, busy_seconds() - busy - step["cpu"]) / (time.perf_counter() - begin)
        steps[contender.name] = step
    total = sum(s["step"] for s in steps.values())
    others = sum(s["others"] * s["step"] for s in steps.values()) / total
    return {"load": load, "others": others, "steps": steps}


def start(names: Sequence[str], workload: Workload, options: dict[str, Any], logs: Path, running: list[Contender],
          left_out: dict[str, str]) -> None:  # fmt: skip
    """Start the contenders together; those that cannot run here go to `left_out` with the reason."""
    with environment(QUIET):
        running += [Contender(name, workload, options, logs) for name in names]
    for contender in list(running):
        try:
            contender.wait_ready()
        except Missing as missing:
            left_out[contender.name] = str(missing)
            running.remove(contender)
            contender.close()


def measure(arguments: argparse.Namespace, workload: Workload, logs: Path) -> dict[str, Any]:
    """Run everything. What is known so far is written to --json after each round: a stopped run is not lost."""
    if arguments.repeats < 1 or arguments.warmup < 0:
        raise ValueError(f"--repeats {arguments.repeats} must be at least 1, --warmup {arguments.warmup} at least 0")
    rounds_to_do = arguments.warmup + arguments.repeats
    folder = model_folder(workload.model, arguments.models)
    options = {
        "folder": str(folder), "steps": rounds_to_do + 2, "threads": arguments.threads,
        "rollout_threads": arguments.rollout_threads, "train_threads": arguments.train_threads,
        "admission": arguments.admission, "settings": settings_of(arguments.set), "engine": arguments.engine,
    }  # fmt: skip
    names = arguments.contenders or contenders_of(arguments)
    running: list[Contender] = []
    left_out: dict[str, str] = {}
    rounds: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "workload": workload.to_dict(), "options": options, "machine": machine(), "left_out": left_out,
        "parameters": parameters_of(folder),
    }  # fmt: skip
    try:
        start(names, workload, options, logs, running, left_out)
        kept = [c.name for c in running]
        if not kept:
            raise ValueError(f"no contender can run here: {left_out}")
        for number in range(rounds_to_do):
            rounds.append(run_round(running, 60 * arguments.wait_quiet))
            shown = ", ".join(f"{n} {s['step']:.2f} s" for n, s in rounds[-1]["steps"].items())
            kind = "warm-up" if number < arguments.warmup else f"round {number - arguments.warmup + 1}"
            print(f"{kind}: {shown}; CPUs taken by others {rounds[-1]['others']:.2f}", file=sys.stderr, flush=True)
            if number >= arguments.warmup:
                measured = rounds[arguments.warmup :]
                figures = {"summary": summary(measured, kept), "ratios": ratios(measured, kept)}
                result |= {"contenders": kept, "rounds": measured, **figures}
                save(result, arguments.json)
    finally:
        for contender in running:
            contender.close()
    return result


def contenders_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Where none is named."""
    names = PLACEMENTS[arguments.placement]
    return tuple(name for name in names if name not in TRL) if arguments.check else names


def save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def parameters_of(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def check(result: dict[str, Any]) -> list[str]:
    """What is wrong with a run: every contender must have trained exactly the workload's tokens."""
    workload = Workload(**result["workload"])
    faults = [f"{name} was left out: {reason}" for name, reason in result["left_out"].items()]
    first = result["options"]["steps"] - 2 - len(result["rounds"])
    for number, one in enumerate(result["rounds"]):
        expected = workload.tokens_of(first + number)
        for name, step in one["steps"].items():
            if step["response_tokens"] != expected:
                faults.append(f"{name}, round {number + 1}: {step['response_tokens']} tokens instead of {expected}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.list_workloads:
        for name, (what, changes) in WORKLOADS.items():
            settings = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in changes.items())
            print(f"{name:20} {what}\n{'':20} {settings or '(the defaults)'}")
        return 0
    if arguments.check:
        arguments.repeats, arguments.warmup = 1, 0
    try:
        workload = workload_of(arguments)
        with tempfile.TemporaryDirectory() as temporary:
            logs = arguments.logs or Path(temporary)
            logs.mkdir(parents=True, exist_ok=True)
            result = measure(arguments, workload, logs)
    except (ValueError, ContenderError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    show(result)
    faults = check(result)
    required = arguments.contenders or (contenders_of(arguments) if arguments.check else ())
    faults = [f for f in faults if " was left out" not in f or f.split()[0] in required]
    for fault in faults:
        print(f"bench_step: {fault}", file=sys.stderr)
    if arguments.check and not faults:
        print("check passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
