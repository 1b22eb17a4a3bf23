"""The command line: `streamline demo`, `streamline inspect FILE`."""

from __future__ import annotations

import sys

import click

from streamline import __version__
from streamline.errors import StreamlineError
from streamline.inspection import report
from streamline.snapshot import Snapshot

__all__ = ["main"]


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
@click.option("--rank", type=int, default=None, help="Which rank's snapshot, if PATH is a directory of several.")
def inspect(path: str, rank: int | None) -> None:
    """Print the snapshot in PATH, a file or a directory, for a person."""
    try:
        click.echo(report(Snapshot.load(path, rank=rank)))
    except StreamlineError as error:
        raise click.ClickException(str(error)) from error
