"""`rollplex report`: one self-contained HTML page of a run.

Reads what loggers and callbacks left in the run's folder; what is not there is named on the page with the callback that
writes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rollplex.reports.compare import read_others
from rollplex.reports.page import Limits, write_report
from rollplex.reports.run_files import read_run


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="rollplex report", description=__doc__)
    out.add_argument("run", metavar="RUN", type=Path, help="the run's folder (trainer.default_root_dir)")
    out.add_argument("--output", metavar="FILE", type=Path, help="default RUN/report.html")
    out.add_argument(
        "--compare", metavar="RUN2", type=Path, nargs="+", default=[],
        help="other runs' folders, or what scripts/bench_step.py --json or rollplex verify --json wrote",
    )  # fmt: skip
    out.add_argument("--sample-sets", type=int, default=3, help="rollout batches whose samples are shown (default 3)")
    out.add_argument("--samples", type=int, default=4, help="samples of each (default 4)")
    out.add_argument("--image-size", type=int, default=320, help="longest side of a picture, pixels (default 320)")
    return out


def main(arguments: list[str]) -> None:
    """Command line; what cannot be read ends it with one line."""
    options = parser().parse_args(arguments)
    try:
        for name, least in (("sample_sets", 0), ("samples", 0), ("image_size", 16)):
            if getattr(options, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(options, name)} must be at least {least}")
        run = read_run(options.run, sample_sets=options.sample_sets)
        limits = Limits(options.samples, options.image_size)
        target = write_report(options.output or options.run / "report.html", run, read_others(options.compare), limits)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    for part in run.missing:
        print(f"{part.what}: {part.why}")
    print(f"report: {target}")
