"""Paths as users give them: which storage a path is in, braces, globs, and errors that say what to do.

Globs over the keys of an object store mean what they mean over files in a shell: `*` and `?` stop at a
slash, `[abc]` and `[!abc]` are one character, `**` is any number of directories, none too; as the last part, everything
below. A bracket makes a character plain: [*], [?], [[].
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from fnmatch import translate
from pathlib import Path
from typing import Any

from streamline.errors import PlanError, PlanTypeError, ReadError, install
from streamline.io.storage.base import ADDED
from streamline.io.storage.manifest import HEAD, check_size, manifests_among, may_be_manifest, parse_manifest, shards_of

MAGIC = re.compile(r"[*?\[]")

DEEP = "**"


def is_glob(path: str) -> bool:
    """Whether a path has anything in it that a glob gives a meaning to."""
    return MAGIC.search(path) is not None


def escape(path: str) -> str:
    """Return a path with nothing in it that a glob gives a meaning to."""
    return MAGIC.sub(lambda found: f"[{found[0]}]", path)


class Glob:
    """A glob over keys, compiled.

    Attributes:
      directory: the keys that it matches are all below it; "": it may be any.
      deep: whether it may match keys of subdirectories too.
    """

    def __init__(self, pattern: str) -> None:
        parts = pattern.split("/")
        plain = next((at for at, part in enumerate(parts) if is_glob(part)), len(parts) - 1)
        self.directory = "/".join(parts[:plain])
        self.deep = plain < len(parts) - 1 or parts[-1] == DEEP
        self._parts = tuple(None if part == DEEP else re.compile(translate(part)).match for part in parts)
        self._fewest = sum(part is not None for part in self._parts) + (self._parts[-1] is None)
        self._most = None if None in self._parts else len(parts)

    def matches(self, key: str) -> bool:
        """Whether a key is one of those that are meant."""
        names = key.split("/")
        if len(names) < self._fewest or (self._most is not None and len(names) > self._most):
            return False
        return _match(self._parts, names)


def _match(parts: tuple[Callable[[str], object] | None, ...], names: list[str]) -> bool:
    for at, part in enumerate(parts):
        if part is None:
            rest = parts[at + 1 :]
            if not rest:
                return len(names) > at
            return any(_match(rest, names[skip:]) for skip in range(at, len(names)))
        if at >= len(names) or part(names[at]) is None:
            return False
    return len(parts) == len(names)


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

MAX_FILES = 1_000_000
"""Paths that braces may make at the most: beyond that a number is a mistake."""

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)")

RANGE = re.compile(r"(\d+)\.\.(\d+)")

STORE_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
"""Schemes of object stores: those of obstore."""

HUB = "hf"
"""The scheme of the Hugging Face Hub: hf://datasets/USER/REPO@REVISION/PATH."""

SCHEME_MEANT = {"s3n": "s3", "gcs": "gs", "wasb": "abfs", "wasbs": "abfss"}
"""Other names of theirs, which obstore doesn't know."""


def is_url(path: str) -> bool:
    return path[:8].lower().startswith(("http://", "https://"))


def scheme_of(path: str) -> str:
    """Return a path's scheme, in small letters; "" of a local one."""
    scheme = SCHEME.match(path)
    return "" if scheme is None else scheme[0].lower()


def is_remote(path: str) -> bool:
    """Whether a storage other than the local one has to be asked for a path."""
    return is_url(path) or is_object(path) or scheme_of(path) == HUB or scheme_of(path) in ADDED


def is_pattern(path: str) -> bool:
    """Whether a remote path is a glob: for the storage to list. HTTP has no listings, and * and ? are letters there."""
    return is_glob(path) and not is_url(path)


def is_object(path: str) -> bool:
    """Whether a path is of an object store: s3://bucket/key."""
    return scheme_of(path) in STORE_SCHEMES


def bucket_of(path: str) -> tuple[str, str]:
    """Return the bucket's URL and the key of a path of an object store, as it is written: "%20" is no blank there."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def hub_path(path: str) -> str:
    """Return a path of the Hub without its scheme."""
    return path.partition("://")[2]


def given_paths(paths: Paths) -> tuple[str, ...]:
    """Return what the user gave, one path or several, as strings; without looking at any file."""
    if isinstance(paths, io.IOBase):
        name = getattr(paths, "name", None)
        shown = repr(name) if isinstance(name, str) else "path"
        raise PlanTypeError(
            f"expected a path, a URL or a list of them, got an open file ({type(paths).__name__}): give its path, "
            f"{shown}, so that a resume and other workers can open it, too"
        )
    several: Any = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    if isinstance(several, bytes) or not isinstance(several, Iterable):
        raise PlanTypeError(f"expected a path, a URL or a list of them, got {type(paths).__name__}")
    found = tuple(map(_one, several))
    if not found:
        raise PlanError("expected at least one path, got an empty list")
    return found


def _one(path: object) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        way = ": give its path" if isinstance(path, io.IOBase) else ""
        raise PlanTypeError(f"expected a path or URL as str or os.PathLike, got {type(path).__name__}: {path!r}{way}")
    if not text or "\0" in text:
        raise PlanError(f"expected a path, got {text!r}")
    if is_url(text):
        _check_url(text)
    elif (scheme := scheme_of(text)) and scheme not in ADDED:
        _check_scheme(scheme, text)
    return text


def check_host(text: str) -> None:
    """Refuse a URL without a host, and one with a user or a password in it."""
    if text.split("://", 1)[1][:1] in ("", *"/?#"):
        raise PlanError(f"expected https://HOST/PATH, got {text}")
    if "@" in text and "@" in re.split(r"[/?#]", text.split("://", 1)[1])[0]:
        raise PlanError(
            f"a URL with a user or a password in it would show them in every message and snapshot: write "
            f'{re.sub("//[^/?#]*@", "//", text)} and http=HttpOptions(auth=("user", "password"))'
        )


def _check_url(text: str) -> None:
    check_host(text)
    if "#" in text:
        raise PlanError(f"{text}: what follows a # is never sent: leave it out, or write %23 if it belongs to the name")
    if "*" in text.split("?")[0]:
        raise PlanError(
            f"HTTP has no listing, so a * can't be expanded: {text}\n"
            "write the names out with braces, part-{000..127}.jsonl or {train,valid}.jsonl, or give a list of URLs "
            "(a * that belongs to a name is written %2A)"
        )


def _check_scheme(scheme: str, text: str) -> None:
    if scheme == "file":
        raise PlanError(f"write a local file as a plain path, not as a URL: {text}")
    if scheme == HUB:
        _check_hub(text)
        return
    if scheme not in STORE_SCHEMES:
        near = f": did you mean {SCHEME_MEANT[scheme]}://?" if scheme in SCHEME_MEANT else ""
        raise PlanError(
            f"{scheme}:// can't be read{near}: give local paths, http(s) URLs, objects as s3://, gs:// or az:// (they "
            f"need {install('stores')}), or files of the Hugging Face Hub as hf:// ({install('hub')}); "
            f"got {text}"
        )
    bucket, key = bucket_of(text)
    if not bucket.partition("://")[2] or not key:
        raise PlanError(f"expected {scheme}://BUCKET/KEY, got {text}")
    if set(bucket) & set("*?["):
        raise PlanError(f"a bucket's name can't be a glob, only keys can: {text}; give a list, or braces: {{a,b}}")


def _check_hub(text: str) -> None:
    parts = hub_path(text).split("/")
    repo = parts[:3] if parts[0] in ("datasets", "spaces", "buckets") else parts[:2]
    if len(parts) <= len(repo) or not all(repo):
        raise PlanError(f"expected hf://datasets/USER/REPO/PATH (or hf://USER/REPO/PATH, of a model), got {text}")
    if set("/".join(repo)) & set("*?["):
        raise PlanError(f"a repository's name can't be a glob, only paths in it can: {text}; give a list, or braces")
    if not parts[-1]:
        raise PlanError(f"{text} is a directory: write {text}* for the files in it, or {text}** for all below it")


def check_once(paths: Iterable[str]) -> None:
    """Insist that no file is there twice, also by two names of one place, "x" and "./x". Links are not looked at."""
    seen: dict[str, str] = {}
    here = ""
    for path in paths:
        plain = path
        if "://" not in path:
            if not path.startswith("/"):
                plain = (here := here or f"{Path.cwd()}/") + path
            plain = os.path.normpath(plain)
        for other in (seen.get(path), seen.get(plain)):
            if other is not None and _one_file(other, path):
                raise PlanError(
                    f"{path}{'' if path == other else f', which is {other},'} is given twice: a state names files, so "
                    "each may be there once; .repeat() reads again"
                )
        seen[path] = path
        seen.setdefault(plain, path)


def _one_file(path: str, other: str) -> bool:
    """Whether two names that look alike mean one file: after a link to a directory, ".." is elsewhere."""
    parts = {*path.split("/"), *other.split("/")}
    return path == other or ".." not in parts or Path(path).samefile(other)


def local_files(path: str) -> Iterator[str]:
    """Yield the local files that a path means; those of one glob sorted. Looks at them.

    A path that exists as it is written is taken so, whatever is in it.
    """
    home = os.path.expanduser(path)  # noqa: PTH111  (a Path would drop a leading ./)
    if _exists(home):
        yield from _expand_manifest(home)
        return
    for one in braces(home):
        if _exists(one) or not glob.has_magic(one):
            yield from _expand_manifest(one)
        else:
            for match in _matches(one):
                yield from _expand_manifest(match) if may_be_manifest(match) else (match,)


def _expand_manifest(path: str) -> Iterator[str]:
    """Yield a file; the shards that a job has written, of its manifest, or the folder with all of them."""
    whole = Path(path).is_dir()
    folder = path.rstrip("/") if whole else path.rpartition("/")[0]
    names = manifests_among(os.listdir(path)) if whole else [path.rpartition("/")[2]] * may_be_manifest(path)  # noqa: PTH208
    contents = {name: _content(os.path.join(folder, name)) for name in names}  # noqa: PTH118 - keeps a leading ./
    parts = [parse_manifest(content, name) for name, content in contents.items() if content is not None]
    if not parts:
        yield _file(path)
        return
    for shard in shards_of(path, parts, whole=whole):
        file = os.path.join(folder, shard.name)  # noqa: PTH118
        check_size(file, size_of(_file(file)), shard)
        yield file


def _content(path: str) -> bytes | None:
    """Return the content of a manifest; None: it is another program's, or isn't there."""
    if not _exists(path) or Path(path).is_dir():
        return None
    size_of(path)  # a pipe would be waited for
    with open(path, "rb") as file:  # noqa: PTH123
        head = file.read(len(HEAD))
        return head + file.read() if head == HEAD else None


def size_of(path: str) -> int:
    try:
        status = Path(path).stat()
        check_regular(path, status)
        return status.st_size
    except ReadError:
        raise
    except OSError as error:
        link = ", and it is a link" if Path(path).is_symlink() else ""
        raise ReadError(f"can't look at {path}: {error.strerror}{link}: repair it, or leave it out") from error


def check_regular(path: str, status: os.stat_result) -> None:
    """Refuse what has no size, and can't be read again: a pipe, a socket, a device."""
    if not stat.S_ISREG(status.st_mode):
        raise ReadError(
            f"{path} is not a regular file: its size isn't known, and it can't be read again. Read a pipe with "
            "from_stream, which keeps what a resume needs"
        )


def _matches(pattern: str) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  (likewise)
    files = [match for match in matches if not Path(match).is_dir()]
    if not files and matches:
        raise ReadError(f"{pattern} matches only directories, {matches[0]} for one: write {pattern.rstrip('/')}/*")
    if not files:
        raise ReadError(
            f"no file matches {pattern}{_seen_from(pattern)}: check the spelling, and that the data is there"
        )
    return files


def _exists(path: str) -> bool:
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ReadError(f"can't look at {path}: {error.strerror}") from error
    return True


def _file(path: str) -> str:
    if not _exists(path):
        raise ReadError(f"no such file: {path}{_seen_from(path)}")
    if Path(path).is_dir():
        raise ReadError(f"{path} is a directory: write {Path(path) / '*'} for its files, or ** for all below it")
    return path


def _seen_from(path: str) -> str:
    return "" if Path(path).is_absolute() else f" (seen from {Path.cwd()})"


def braces(text: str) -> list[str]:
    """Return the texts that braces in `text` stand for; a bounded number.

    {000..127} (as many digits), {a,b,c}, nested, as in a shell.
    """
    if "{" not in text and not is_url(text):
        return [text]
    start, stop = _first_group(text)
    if start < 0:
        if is_url(text) and ("{" in text or "}" in text):
            raise PlanError(f"braces that mean nothing in {text}: write {{000..127}} or {{a,b,c}}")
        return [text]
    head = text[:start]
    made: list[str] = []
    tails = braces(text[stop:]) if "{" in text[stop:] else [text[stop:]]
    for choice in _choices(text[start + 1 : stop - 1]):
        inner = braces(choice) if "{" in choice else [choice]
        made.extend(head + one + tail for one in inner for tail in tails)
        if len(made) > MAX_FILES:
            raise PlanError(f"{text} stands for more than {MAX_FILES:,} files")
    return made


def _first_group(text: str) -> tuple[int, int]:
    """Return [start, stop) of the first pair of braces that stand for several texts; (-1, -1) if there is none."""
    for start, character in enumerate(text):
        if character == "{" and (stop := _closing(text, start)) > 0:
            inside = text[start + 1 : stop - 1]
            if RANGE.fullmatch(inside) or len(_split(inside)) > 1:
                return start, stop
    return -1, -1


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if not depth:
            return index + 1
    return -1


def _choices(inside: str) -> Iterable[str]:
    numbers = RANGE.fullmatch(inside)
    if numbers is None:
        return _split(inside)
    first, last = int(numbers[1]), int(numbers[2])
    padded = any(len(text) > 1 and text.startswith("0") for text in numbers.groups())
    width = max(map(len, numbers.groups())) if padded else 0
    step = 1 if first <= last else -1
    return (str(number).zfill(width) for number in range(first, last + step, step))


def _split(inside: str) -> list[str]:
    """Split at the commas that are in no inner braces."""
    parts, depth = [""], 0
    for character in inside:
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
