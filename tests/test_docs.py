"""The pages under docs/ are true: their Python blocks run, and print what the page says.

The convention:

- All ```python blocks of a page run in order, in one namespace, in an empty directory of the page's own.
- A block of plain ``` right behind one (nothing but empty lines between) is what that block prints, to the letter;
  trailing blanks don't count. A line of `...` stands for any lines, also none. A block without such an output behind it
  may print what it likes, but for a comment right behind a `print(...)`, on its line: that is a line of what the block
  prints, in this order.
- A line `<!-- not run: REASON -->` right above a ```python block switches it off; `<!-- not compared: REASON -->` right
  above an output (it differs from run to run, say) keeps that from being compared. The reason is for readers.
- A port of 127.0.0.1 is a free one: another program may have the one that the page names.
- Warnings are errors, as in all tests.

Not for the README, which tells of programs that run elsewhere, but for its first program: with data, it runs.
"""

from __future__ import annotations

import asyncio
import builtins
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tests.laws.profile import mostly_long

ROOT = Path(__file__).parent.parent

PAGES = sorted((ROOT / "docs").glob("*.md"))

LINK = re.compile(r"\]\((?!https?:)([^()#\s]*)(?:#([^()\s]*))?\)")

FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,})(?P<language>[\w+-]*)[^`\n]*$")
COMMENT = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
LOOPBACK = re.compile(r"127\.0\.0\.1:(\d+)")
SWITCH = re.compile(r"<!-- (?P<what>not run|not compared): (?P<reason>\S.*?) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
      line: of its first line of text, from 1.
      behind: of what stands before it, the last line that isn't empty.
      follows: whether only empty lines (and a switch) are between it and the block before.
    """

    language: str
    text: str
    line: int
    behind: str
    follows: bool

    @property
    def switch(self) -> str | None:
        """What the line above it switches off: "not run", "not compared"; None: nothing."""
        found = SWITCH.fullmatch(self.behind)
        return None if found is None else found["what"]


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    behind, follows, opened, held, first = "", False, None, list[str](), 0
    for number, line in enumerate(page.splitlines(), 1):
        fence = FENCE.fullmatch(line)
        if opened is None:
            if fence is not None:
                opened, held, first = fence, [], number + 1
            elif line.strip():
                behind = line.strip()
                follows = follows and SWITCH.fullmatch(behind) is not None
        elif fence is not None and fence["fence"] == opened["fence"] and not fence["language"]:
            text = "\n".join(line.removeprefix(opened["indent"]) for line in held)
            yield Block(opened["language"], text, first, behind, follows)
            behind, follows, opened = "", True, None
        else:
            held.append(line)


def agree(printed: str, page: str) -> bool:
    """Whether what was printed is what the page says."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    pattern = "".join(
        r"(?:[^\n]*\n)*" if line.strip() == "..." else re.escape(line.rstrip()) + "\n" for line in page.splitlines()
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def check_page(name: str, page: str, capture: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a page, here."""
    namespace: dict[str, Any] = {"__name__": "__docs__", "__builtins__": builtins}
    printed: str | None = None
    ports = defaultdict[str, int](free_port)
    for block in blocks(page):
        if block.language == "python":
            printed = None
            if block.switch == "not run":
                continue
            text = LOOPBACK.sub(lambda found: f"127.0.0.1:{ports[found[1]]}", block.text)
            code = compile("\n" * (block.line - 1) + text, name, "exec", dont_inherit=True)
            exec(code, namespace)
            printed = capture.readouterr().out
            lines = iter(printed.splitlines())
            for said in COMMENT.findall(block.text):
                assert said in lines, f"{name}, line {block.line}: {said!r}, says a comment; printed was\n{printed}"
        elif block.language == "" and block.follows and printed is not None and block.switch != "not compared":
            assert agree(printed, block.text), (
                f"{name}, line {block.line}: the page says\n{block.text}\nprinted was\n{printed}"
            )
            printed = None


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize("path", mostly_long(PAGES, 3), ids=lambda path: path.name)
def test_a_page_is_true(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_page(str(path), path.read_text(encoding="utf-8"), capsys)


def anchors(page: Path) -> set[str]:
    """Return what `#...` may name on a page, as GitHub writes headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}, which isn't there"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}: no such heading"


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    page = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").partition("## Tiny items")[2].partition("\n## ")[0]
    median = {
        case.strip(): figure for case, figure in re.findall(r"^\| ([^|]*) \| ([\d.]+(?: [kM])?) \(", page, re.MULTILINE)
    }
    ratio = re.search(r"^\| streamline, async for \| [^|]* \| ([\d.]+) ", page, re.MULTILINE)
    machine = re.search(r"\((?P<cpu>[^\n]*), (?P<cores>\d+ cores), .*, (?P<python>CPython [\d.]+), asyncio\.\)", page)
    assert ratio is not None
    assert machine is not None
    (says,) = re.findall(r"^One number: .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    for part in (
        f"costs {1 / float(ratio[1]):.2f} times",
        f"{median['streamline, async for']} items/s",
        f"spdl does {median['spdl, async fn, 64 in flight']}",
        f"grain {median['grain, no threads']}",
        f"torchdata.nodes {median['torchdata.nodes Mapper']}",
        f"{machine['cores']} of an {machine['cpu']} with {machine['python']}",
    ):
        assert part in says


def test_each_ratio_that_misses_its_target_is_on_the_page_about_performance() -> None:
    missed = re.findall(r"\*\*no: ([\d.]+) \u00d7 ", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"))
    says = set(re.findall(r"([\d.]+) \u00d7", (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")))
    assert missed
    rounded = [{f"{float(ratio):.2f}", f"{float(ratio):.{1 if float(ratio) >= 1 else 2}f}"} for ratio in missed]
    assert [ratio for ratio, either in zip(missed, rounded, strict=True) if not either & says] == []


# The reader of pages ------------------------------------------------------------------------------------------------

PAGE = """
Text.

```python
print("one")
value = 2
```

```
one
```

```python
print(value)
```

Words between, so the next one is no output.

```
three
```

<!-- not run: it would fail -->
```python
raise ValueError
```

```
nothing is compared with this
```

```python
print("a", value, sep="\\n")
```

<!-- not compared: as an example -->
```
b
```

```json
{"no": "python"}
```
"""


def test_a_page_is_read_as_its_convention_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert [block.language for block in blocks(PAGE)].count("python") == 4
    check_page("page.md", PAGE, capsys)


def test_another_output_is_found_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match=r"page\.md, line 10: the page says\n *two\n *printed was\n *one"):
        check_page("page.md", PAGE.replace("```\none", "```\ntwo"), capsys)


def test_a_comment_that_is_not_printed_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    check_page("page.md", PAGE.replace('print("one")', 'print("one")  # one'), capsys)
    with pytest.raises(AssertionError, match=r"page\.md, line 5: 'two', says a comment; printed was\n *one"):
        check_page("page.md", PAGE.replace('print("one")', 'print("one")  # two'), capsys)


def test_a_block_that_fails_is_found_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError) as failed:
        check_page("page.md", PAGE.replace("value = 2", "1 / 0"), capsys)
    assert [(entry.path, entry.lineno) for entry in failed.traceback][-1][1] == 5


def test_an_ellipsis_stands_for_any_lines() -> None:
    assert agree("a\nb\nc\n", "a\n...\nc")
    assert agree("a\nc \n", "a\n...\nc")
    assert not agree("a\nb\n", "a\n...\nc")
    assert not agree("a\n", "a\nb")
    assert agree("  a\n", "  a")
    assert not agree("a\n", "  a")


@pytest.mark.parametrize("way", ["with", "async with"])
def test_the_first_program_of_the_readme_runs_and_goes_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    for part in range(8):
        (tmp_path / f"train/part-{part}.jsonl").write_text("".join(f"{part * 40 + line}\n" for line in range(40)))
    program = next(block.text for block in blocks((ROOT / "README.md").read_text()))
    if way == "async with":
        loop = (
            program[program.index("with pipe") :].replace("with pipe", "async with pipe").replace("for ", "async for ")
        )
        program = (
            f"{program[: program.index('with pipe')]}async def main():\n{indent(loop, '    ')}\nasyncio.run(main())"
        )
    trained: list[int] = []

    def train(batch: Any) -> None:
        if len(trained) == 96 and killed:
            raise EOFError(killed.pop())
        trained.extend(batch.tolist())

    killed = ["in the fourth step"]
    names = {"tokenize": int, "train": train, "asyncio": asyncio}
    with pytest.raises(EOFError, match="in the fourth step"):
        exec(program, dict(names))
    exec(program, dict(names))
    assert sorted(trained) == list(range(320))
