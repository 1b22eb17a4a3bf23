"""The command line: `streamline demo`, `inspect FILE`, `steps PATH 3..5`, `check`, `run FILE.py:pipe`, `top URL`, …"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction, signature
from pathlib import Path
from shutil import get_terminal_size
from types import ModuleType
from typing import Any

import click

from streamline import __version__
from streamline.errors import DISTRIBUTION, PlanError, StreamlineError, printable_lines

WIDTH, WIDEST = 120, 160
"""Columns where there is no terminal, and at the most."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=DISTRIBUTION)
def main() -> None:
    """Data into training loops, with exact resume at every item."""


@main.command()
@click.option("--quick", is_flag=True, help="A quarter of the records: seconds.")
def demo(quick: bool) -> None:
    """Train on this Python's standard library over HTTP, be killed half-way, resume, and compare.

    Exits with 1 if the resumed run is not bit-identical with an uninterrupted one.
    """
    from streamline.demo import run_demo  # imports aiohttp: for this command only

    sys.exit(run_demo(quick=quick))


@main.command()
@click.argument("path", type=click.Path())
@click.option("--rank", type=int, default=None, help="Only this rank's, if PATH is a directory of several.")
def inspect(path: str, rank: int | None) -> None:
    """Print the snapshot in PATH, a file or a directory, for a person.

    Whose it is, the files and the plan that it was taken of, where each shard stands, and what a resume does again.
    """
    import streamline.pipeline  # noqa: F401 - with it, all kinds of stages are known
    from streamline.snapshot.inspection import report
    from streamline.snapshot.snapshot import Snapshot

    width = min(get_terminal_size((WIDTH, 24)).columns, WIDEST)
    try:
        click.echo(report(Snapshot.load(path, rank=rank), width), nl=False)
    except StreamlineError as error:
        raise click.ClickException(str(error)) from error


def _range(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise click.BadParameter(f"expected a step, 1820, or the first and the last one, 1820..1840, got {text!r}")
    return first, last


@main.command()
@click.argument("path", type=click.Path())
@click.argument("steps", callback=_range)
@click.option("--rank", type=click.IntRange(0), default=None, help="Only this rank's.")
@click.option("--epoch", type=click.IntRange(0), default=None, help="Of this epoch, if there are several.")
def steps(path: str, steps: tuple[int, int], rank: int | None, epoch: int | None) -> None:
    """Print which items were in the steps FIRST..LAST that open(record=sl.Recorder(PATH)) has recorded.

    Of each step, from where to where each shard was read: files, and lines, bytes, rows or records. Exits with 1 if
    none of them is recorded.
    """
    import streamline.pipeline  # noqa: F401 - with it, all kinds of stages are known
    from streamline.snapshot.inspection import describe_steps
    from streamline.snapshot.steps import StepRecords

    try:
        records = StepRecords(path, epoch)
        for line in describe_steps(records, *steps, rank):
            click.echo(line)
        ranks = records.ranks if rank is None else [rank]
        found = any(True for one in ranks for _ in records.read(one, *steps))
    except StreamlineError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if found else 1)


@main.command()
@click.argument("target")
@click.option("--world-size", type=click.IntRange(1), default=None, help="Ranks of the job that is planned.")
def check(target: str, world_size: int | None) -> None:
    """Look at the pipeline TARGET before it is run, in seconds: FILE.py:NAME or package.module:NAME.

    Says what would be read, and by whom; reads the first record of a few files, and runs these through the stages. A
    function is called, without arguments, and returns the pipeline. Exits with 1 if anything is found on which a run
    would fail.
    """
    from streamline.pipeline import Pipeline  # imports what a run needs: not for the other commands

    try:
        report = named(target, Pipeline).check(world_size=world_size)
    except StreamlineError as error:
        raise click.ClickException(str(error)) from error
    click.echo(str(report))
    sys.exit(0 if report.ok else 1)


def _bytes(_: click.Context, __: click.Parameter, text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*(?:([KMG])(i?)B?|B)?", text, re.IGNORECASE)
    if found is None or not int(found[1]):
        raise click.BadParameter(f"expected a number of bytes, 100000, 256MiB or 1GB, got {text!r}")
    power = 0 if found[2] is None else "KMG".index(found[2].upper()) + 1
    return int(found[1]) * int((1024 if found[3] else 1000) ** power)


def _backend(_: click.Context, __: click.Parameter, text: str) -> Any:
    from streamline.backends.inline import Inline
    from streamline.backends.processes import Processes
    from streamline.backends.threads import Threads

    if text == "inline":
        return Inline()
    kind, _colon, number = text.partition(":")
    if kind not in ("threads", "processes") or not number.isdecimal() or not int(number):
        raise click.BadParameter(f"expected inline, threads:N or processes:N, got {text!r}")
    return (Threads if kind == "threads" else Processes)(int(number))


@main.command()
@click.argument("target")
@click.option("--to", "folder", required=True, metavar="FOLDER", help="Local, or in a store: s3://, gs://, az://.")
@click.option("--format", type=click.Choice(["jsonl", "npy", "parquet", "tar"]), default="jsonl", show_default=True)
@click.option("--shard-bytes", callback=_bytes, default="256MiB", show_default=True, help="A shard's size, about.")
@click.option("--compression", metavar="NAME", help="Of jsonl and tar gzip or zstd; of parquet one of pyarrow's.")
@click.option("--resume", is_flag=True, help="Go on with the job that has begun to write there, or begin.")
@click.option("--backend", callback=_backend, default="inline", show_default=True, help="Or threads:N, or processes:N.")
def run(
    target: str, folder: str, format: Any, shard_bytes: int, compression: str | None, resume: bool, backend: Any
) -> None:
    """Run the pipeline TARGET, FILE.py:NAME or package.module:NAME, and write its items to a folder of shards.

    Exactly once across kills and resumes. A function is called, without arguments, and returns the pipeline. Shows how
    it gets on. Exits with 1 if it fails, and with 130 after Ctrl-C: the whole shards stay, and --resume goes on.
    """
    from streamline.pipeline import Pipeline  # imports what a run needs: not for the other commands
    from streamline.runtime.writing import output_format

    try:
        if compression is not None:
            output_format(format).compressed(compression)
    except PlanError as error:
        raise click.BadParameter(str(error), param_hint="--compression") from error
    try:
        pipeline = named(target, Pipeline)
        found = pipeline.write(
            folder,
            format,
            shard_bytes=shard_bytes,
            compression=compression,
            resume=resume,
            backend=backend,
            progress=True,
        )
    except StreamlineError as error:
        raise click.ClickException(printable_lines("\n".join([str(error), *_notes(error)]))) from error
    except KeyboardInterrupt as error:
        click.echo(printable_lines("\n".join(["Stopped; --resume goes on.", *_notes(error)])), err=True)
        sys.exit(130)
    except Exception as error:
        traceback.print_exception(error)
        sys.exit(1)
    todo = ": nothing to do" if found.items and found.items == found.items_before else ""
    click.echo(f"{found}{todo}")


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


@main.command()
@click.argument("url")
def top(url: str) -> None:
    """Show the live page at URL, as open(page=True) has printed it, in this terminal, until Ctrl-C or its end.

    Without a terminal, each update is printed after the one before. Exits with 1 if there is no such page.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    said = ""
    try:
        with urlopen(f"{url.rstrip('/')}/top", timeout=TOP_S) as updates, _on_screen() as show:
            lines: list[str] = []
            for line in updates:
                if line.strip():
                    lines.append(printable_lines(line.decode().removeprefix("data: ").rstrip("\n")))
                else:
                    show(said := "\n".join(lines))
                    lines.clear()
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        if not said:
            raise click.ClickException(printable_lines(f"there is no page at {url}: {error}")) from error
    except KeyboardInterrupt:
        return
    click.echo(f"{said}\nThe page has closed.")


TOP_S = 120.0
"""Seconds without an update after which a page is given up."""


@contextmanager
def _on_screen() -> Iterator[Callable[[str], object]]:
    """Yield what shows a text in place of the one before it; without a terminal, after it."""
    if not sys.stdout.isatty():
        yield click.echo
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False, screen=True) as live:
        yield lambda text: live.update(Text(text, no_wrap=False), refresh=True)


@main.command()
@click.option("--connect", required=True, metavar="HOST:PORT", help="Where the trainer listens: Remote(listen=).")
@click.option(
    "--key-file", type=click.Path(), default=None, help="The key that the trainer has, too; else STREAMLINE_KEY."
)
@click.option(
    "--tls", type=click.Path(), default=None, help="A folder with the trainer's tls.crt, or its ca.crt: encrypt."
)
@click.option("--hosts", type=click.IntRange(1), default=None, help="Processes at once; by default one per core.")
@click.option(
    "--wait", type=click.FloatRange(0), default=300.0, show_default=True, help="Seconds for the trainer to listen."
)
@click.option(
    "--rejoin",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds for it to listen again after it has ended a stream.",
)
def worker(connect: str, key_file: str | None, tls: str | None, hosts: int | None, wait: float, rejoin: float) -> None:
    """Run workers on this machine for the trainer at HOST:PORT, whose pipeline is opened with backend=sl.Remote(n).

    Ends some seconds after the trainer (--rejoin). Exits with 1 if that was lost, can't be reached, or refuses this
    machine.
    """
    from streamline.backends.network.handshake import read_key
    from streamline.backends.network.tls import Certificates
    from streamline.backends.remote.agent import ended_by_sigterm, run_agent  # for this command only
    from streamline.core.cpus import cpus_here
    from streamline.core.options import parse_address

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        address, key, certificates = parse_address("--connect", connect), read_key(key_file), Certificates.of(tls)
        with ended_by_sigterm():
            lost = run_agent(address, key, hosts or cpus_here(), tls=certificates, wait_s=wait, rejoin_s=rejoin)
    except StreamlineError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if lost is None else 1)


SHOWN_NAMES = 8
"""Names that a message lists."""


def named(text: str, kind: type) -> Any:
    """Return the object of type `kind` that `text` names; a function is called, without arguments.

    The file is run as a module of another name than "__main__", so what stands under `if __name__ == "__main__"`
    isn't.

    Raises:
      PlanError: there is no such file, module or name; it raises; or it is something else.
    """
    file, colon, name = text.rpartition(":")
    if not colon:
        file, name = text, ""
    if not file:
        raise PlanError(f"expected FILE.py:name or package.module:name, got {text!r}")
    is_file = file.endswith(".py") or "/" in file
    with _found_from(Path(file).parent if is_file else Path()):
        module = _import_module(file, is_file)
        there = sorted(key for key, value in vars(module).items() if isinstance(value, kind))
        if not name:
            raise PlanError(f"say which pipeline of {file}: {file}:NAME; {_names_text(there)}")
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise PlanError(f"{file} has no {name!r}; {_names_text(there)}")
            found = getattr(found, part)
        if not isinstance(found, kind) and callable(found):
            found = _call_function(file, name, found)
    if not isinstance(found, kind):
        raise PlanError(f"{text} is no pipeline, but of type {type(found).__name__}; {_names_text(there)}")
    return found


def _import_module(file: str, is_file: bool) -> ModuleType:
    if not is_file:
        try:
            found = importlib.util.find_spec(file)
        except (ImportError, ValueError) as error:
            raise PlanError(f"there is no module {file}: {error}") from error
        if found is None:
            raise PlanError(f"there is no module {file}: give FILE.py:name, or a module that can be imported here")
        module: ModuleType = _run(file, lambda: importlib.import_module(file))
        return module
    if not Path(file).is_file():
        raise PlanError(f"no such file: {file}" + ("" if Path(file).is_absolute() else f" (seen from {Path.cwd()})"))
    name = f"streamline_check_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlanError(f"{file} is no Python file: expected a name that ends in .py")
    made, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = made  # dataclasses and pickle look there
    _run(file, lambda: loader.exec_module(made))
    return made


def _call_function(file: str, name: str, function: Any) -> Any:
    if iscoroutinefunction(function):
        raise PlanError(f"{name} in {file} is an async function: give a plain one that returns the pipeline")
    try:
        signature(function).bind()
    except TypeError as error:
        raise PlanError(f"{name} in {file} can't be called without arguments: {error}") from error
    except ValueError:
        pass  # a built-in that doesn't say
    return _run(f"{file}:{name}", function)


def _run(what: str, work: Any) -> Any:
    """Run a user's code, and translate what it raises."""
    try:
        return work()
    except SystemExit as error:
        raise PlanError(
            f'{what} ended the program (exit code {error.code}): put what runs it under if __name__ == "__main__"'
        ) from error
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise PlanError(f"{what} raised {type(error).__name__}: {error} ({at.filename}, line {at.lineno})") from error


@contextmanager
def _found_from(folder: Path) -> Iterator[None]:
    """Import from a folder first, and show the script no arguments, as when it is run itself."""
    path, arguments = list(sys.path), list(sys.argv)
    sys.path.insert(0, str(folder.absolute()))
    sys.argv[1:] = []
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, arguments


def _names_text(names: list[str]) -> str:
    return f"pipelines there: {', '.join(names[:SHOWN_NAMES])}" if names else "there are no pipelines in it"
