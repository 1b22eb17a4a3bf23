"""Runs all benchmarks: `python -m bench [name ...] [--smoke] [--uvloop] [--rounds N] [--write]`."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import (
    async_map,
    batch_arrays,
    batched_map,
    copies,
    cycle_memory,
    decode_images,
    harness,
    host_memory,
    http_objects,
    latencies,
    live_page,
    metering,
    mix,
    pack,
    process_arrays,
    process_batches,
    process_tiny,
    process_transform,
    read_jsonl,
    read_npy,
    read_parquet,
    read_rows,
    read_tar,
    read_tfrecord,
    recovery,
    regenerate,
    remote,
    replicate,
    report,
    resume,
    resumed_samples,
    scale,
    seeded_map,
    snapshot_cost,
    start_up,
    step_record,
    tables,
    thread_decode,
    tiny_items,
    training_step,
    transfer,
    tuning,
    write_shards,
)
from bench.nginx import Nginx
from bench.suite import Suite

SUITES: dict[str, tuple[Suite, ...]] = {
    "tiny_items": tiny_items.SUITES,
    "async_map": async_map.SUITES,
    "batch_arrays": batch_arrays.SUITES,
    "batched_map": batched_map.SUITES,
    "seeded_map": seeded_map.SUITES,
    "copies": copies.SUITES,
    "snapshot_cost": snapshot_cost.SUITES,
    "step_record": step_record.SUITES,
    "tuning": tuning.SUITES,
    "resume": resume.SUITES,
    "latencies": latencies.SUITES,
    "live_page": live_page.SUITES,
    "metering": metering.SUITES,
    "mix": mix.SUITES,
    "pack": pack.SUITES,
    "process_transform": process_transform.SUITES,
    "process_arrays": process_arrays.SUITES,
    "process_batches": process_batches.SUITES,
    "process_tiny": process_tiny.SUITES,
    "remote": remote.SUITES,
    "recovery": recovery.SUITES,
    "thread_decode": thread_decode.SUITES,
    "decode_images": decode_images.SUITES,
    "read_jsonl": read_jsonl.SUITES,
    "read_npy": read_npy.SUITES,
    "read_parquet": read_parquet.SUITES,
    "read_rows": read_rows.SUITES,
    "read_tar": read_tar.SUITES,
    "read_tfrecord": read_tfrecord.SUITES,
    "tables": tables.SUITES,
    "regenerate": regenerate.SUITES,
    "cycle_memory": cycle_memory.SUITES,
    "start_up": start_up.SUITES,
    "host_memory": host_memory.SUITES,
    "transfer": transfer.SUITES,  # on a GPU there are more: `python -m bench.transfer`
    "training_step": training_step.SUITES,
    "replicate": replicate.SUITES,
    "write_shards": write_shards.SUITES,
}
SERVED = "http_objects"
"""Those that need a server beside them; left out, with a word, where there is none."""
NAMES = (*SUITES, SERVED, "resumed_samples", "scale")
PAGE = Path(__file__).parent.parent / "BENCHMARKS.md"

INTRODUCTION = """\
# Benchmarks

Written by `python -m bench --write`. Each case has its own process; rounds are interleaved A B C A B C, one warm-up and
those that are measured, 5 if nothing else was said; every run's items are verified. Targets are ratios within one run,
because ratios move less between machines than rates do; a ratio is the median of the rounds' own ratios. Each table
says where it was measured.
"""


def main() -> None:
    parser = harness.parser()
    parser.add_argument("names", nargs="*", metavar="name", help=f"which to run: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}; with names, only their tables in it")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if arguments.write and arguments.smoke:
        parser.error("--write takes a measured run, not --smoke")
    options = harness.options_of(arguments)
    versions = report.versions()
    print(report.where(options.use_uvloop), versions, sep="\n")
    names = arguments.names or NAMES
    tables, sound = harness.run([suite for name in names if name in SUITES for suite in SUITES[name]], options)
    if SERVED in names and Nginx.missing():
        print(f"left out: {http_objects.MISSING}\n")
    elif SERVED in names:
        http_objects.serve(smoke=options.smoke)
        more, right = harness.run(http_objects.suites(), options)
        tables, sound = f"{tables}\n{more}", sound and right
    if "resumed_samples" in names:
        counts, exact = resumed_samples.run(smoke=arguments.smoke)
        print(counts)
        tables, sound = f"{tables}\n{counts}", sound and exact
    if "scale" in names:
        scale.run(scale.SMOKE if arguments.smoke else scale.Sizes())
    if arguments.write and sound:
        before, text = PAGE.read_text(encoding="utf-8"), "\n".join([INTRODUCTION, versions, tables])
        PAGE.write_text(report.updated(before, text, whole=not arguments.names), encoding="utf-8")
    sys.exit(not sound)


if __name__ == "__main__":
    main()
