"""Runs all benchmarks: `python -m bench [name ...] [--smoke] [--uvloop] [--rounds N] [--write]`."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import async_map, batch_arrays, harness, report, resume, snapshot_cost, tiny_items
from bench.suite import Suite

SUITES: dict[str, tuple[Suite, ...]] = {
    "tiny_items": tiny_items.SUITES,
    "async_map": async_map.SUITES,
    "batch_arrays": batch_arrays.SUITES,
    "snapshot_cost": snapshot_cost.SUITES,
    "resume": resume.SUITES,
}
PAGE = Path(__file__).parent.parent / "BENCHMARKS.md"

INTRODUCTION = """\
# Benchmarks

Written by `python -m bench --write`. Each case has its own process; rounds are interleaved A B C A B C, one warm-up and
{rounds} measured; every run's items are verified. Targets are ratios within one run, because ratios move less
between machines than rates do; a ratio is the median of the rounds' own ratios.
"""


def main() -> None:
    parser = harness.parser()
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run: {', '.join(SUITES)} (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SUITES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    if arguments.write and (arguments.smoke or arguments.names):
        parser.error("--write takes a whole measured run: neither --smoke nor names")
    options = harness.options_of(arguments)
    header = report.header(options.use_uvloop)
    print(header)
    suites = [suite for name in arguments.names or SUITES for suite in SUITES[name]]
    tables, sound = harness.run(suites, options)
    if arguments.write and sound:
        PAGE.write_text("\n".join([INTRODUCTION.format(rounds=options.rounds), header, tables]), encoding="utf-8")
    sys.exit(not sound)


if __name__ == "__main__":
    main()
