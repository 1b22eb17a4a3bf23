"""The command line: `streamline demo`, `streamline inspect FILE`, `streamline check FILE.py:pipe`."""

from __future__ import annotations

import sys
from shutil import get_terminal_size

import click

from streamline import __version__
from streamline.errors import StreamlineError, printable
from streamline.snapshot.inspection import report
from streamline.snapshot.snapshot import Snapshot

__all__ = ["main"]

WIDTH, WIDEST = 120, 160
"""Columns where there is no terminal, and at the most."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamline")
def main() -> None:
    """Data into training loops, with exact resume at every item."""


@main.command()
@click.option("--quick", is_flag=True, help="A few hundred records instead of all: seconds.")
def demo(quick: bool) -> None:
    """Train on this Python's standard library over HTTP, be killed half-way, resume, and compare.

    Exits with 1 if the resumed run is not bit-identical with an uninterrupted one.
    """
    from streamline.demo.run import run_demo  # the demo's modules are nobody else's business

    sys.exit(run_demo(quick=quick))


@main.command()
@click.argument("path", type=click.Path())
@click.option("--rank", type=int, default=None, help="Only this rank's, if PATH is a directory of several.")
def inspect(path: str, rank: int | None) -> None:
    """Print the snapshot in PATH, a file or a directory, for a person.

    Whose it is, the files and the plan that it was taken of, where each shard stands, and what a resume does again.
    """
    width = min(get_terminal_size((WIDTH, 24)).columns, WIDEST)
    try:
        click.echo(report(Snapshot.load(path, rank=rank), width), nl=False)
    except StreamlineError as error:
        raise click.ClickException(_shown(error)) from error


@main.command()
@click.argument("target")
@click.option("--world-size", type=click.IntRange(1), default=None, help="Ranks of the job that is planned.")
def check(target: str, world_size: int | None) -> None:
    """Look at the pipeline TARGET before it is run, in seconds: FILE.py:NAME or package.module:NAME.

    Says what would be read, and by whom; reads the first record of a few files, and runs these through the stages. A
    function is called, without arguments, and returns the pipeline. Exits with 1 if anything is found on which a run
    would fail.
    """
    from streamline.pipeline import Pipeline
    from streamline.preflight.target import target as named

    try:
        report = named(target, Pipeline).check(world_size=world_size)
    except StreamlineError as error:
        raise click.ClickException(_shown(error)) from error
    click.echo(_shown(report))
    sys.exit(0 if report.ok else 1)


def _shown(text: object) -> str:
    """Return text of several lines for a terminal: what records and servers say may hold anything."""
    return "\n".join(map(printable, str(text).split("\n")))
