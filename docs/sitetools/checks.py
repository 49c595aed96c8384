"""Checks of the words and sentences of all pages: spelling, grammar, and the conventions of this project.

Spelling and grammar are checked by Harper, which works offline: British English, and the words of `docs/words.txt`.
Common misspellings, in code blocks too, are found by codespell.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sitetools.docstring import markdown, sections_of
from sitetools.public_names import public_names
from sitetools.sources import sources

WORDS = Path(__file__).parents[1] / "words.txt"

SPELLING = "SpellCheck"
GRAMMAR = (
    *("AnA", "AnAnother", "Cant", "CorrectNumberSuffix", "CriteriaPhenomena", "Didnt", "DoesOrDose", "DoubleModal"),
    *(
        "EachOthersPossessive",
        "ItsContraction",
        "ItsPossessive",
        "LessWorse",
        "LetsConfusion",
        "LongSentences",
        "ModalOf",
        "MoreBetter",
    ),
    *(
        "NeedToNoun",
        "NoFrenchSpaces",
        "OneOfTheSingular",
        "PronounInflectionBe",
        "PronounVerbAgreement",
        "RepeatedWords",
        "SubjectPronoun",
    ),
    *(
        "TheAnother",
        "ThenThan",
        "ThereIsAgreement",
        "ThesesThese",
        "TheTheToThatThe",
        "ToTo",
        "ToTwoToo",
        "TransposedSpace",
    ),
    *("ThereToTheir", "TheirToThere", "UseToUsedTo", "VerbToAdjective", "WasAloud", "WrongApostrophe"),
)
"""The rules of Harper that hold here; its others ask for other styles, such as capitals in headings."""

MARKETING = (
    *("amazing", "awesome", "best-in-class", "blazing", "blazingly", "cutting-edge", "delightful", "effortless"),
    *("effortlessly", "elegant", "elegantly", "game-changing", "incredible", "incredibly", "lightning-fast", "magical"),
    *(
        "magically",
        "next-generation",
        "powerful",
        "revolutionary",
        "seamless",
        "seamlessly",
        "state-of-the-art",
        "stunning",
    ),
    *("super-fast", "ultimate", "unparalleled", "world-class", "simply", "obviously", "of course", "needless to say"),
)
"""Praise, and words that tell a reader that something should have been easy."""

NAMES_IN_CODE = ("cant", "didnt", "dout", "ofmodule", "vermillion")
"""Names of variables and classes that look like misspellings."""

UNCHECKED = ("CHANGELOG.md", "docs/records/planner_table.md", "docs/records/step_times.md", "docs/reference/terms.md")
"""What is history, and tables of hardly more than names and letters."""

IN_DOCSTRINGS = (SPELLING, "RepeatedWords", "Cant", "Didnt", "ItsPossessive", "WrongApostrophe")
"""The rules for docstrings, which are terser and full of names."""

HEADING_LENGTH = 70

_STORED_PICTURE = "[A-Za-z0-9+/=]{60,}"
"""What codespell leaves out: the letters of pictures in notebooks."""

_HIDDEN = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)$|^(?: {4}.*\n)+|<!--.*?-->|</?[a-z][^<>]*>|https?://[^\s)]+|(?<=\])\([^)\s]+\)",
    re.DOTALL | re.MULTILINE,
)


class Text(NamedTuple):
    """What a page says.

    Attributes:
      file: where it stands.
      markdown: its words.
      rules: the rules of Harper that hold for it.
    """

    file: str
    markdown: str
    rules: tuple[str, ...] = (SPELLING, *GRAMMAR)


def check_texts(root: Path) -> list[str]:
    """Check all pages.

    Args:
      root: the repository.

    Returns:
      A line for everything that was found: file, line and what to change.
    """
    texts = list(_texts(root))
    known = [
        word for line in WORDS.read_text(encoding="utf-8").splitlines() if line[:1] != "#" for word in line.split()
    ]
    problems = [problem for text in texts for problem in check_conventions(text)]
    return [*problems, *check_language(texts, known), *check_misspellings(root)]


def check_conventions(text: Text) -> Iterator[str]:
    """Say where a page praises, or has a heading of another form than the others."""
    for number, line in enumerate(without_code(text.markdown).splitlines(), 1):
        where = f"{text.file}:{number}"
        words = re.sub(r"`[^`]*`", "", line)
        for word in re.findall(rf"\b(?:{'|'.join(MARKETING)})\b", words, re.IGNORECASE):
            yield f"{where}: {word!r}: say what it does, and leave the judgement to the reader"
        heading = re.match(r"#+ (.*)", line)
        if heading and heading[1].rstrip()[-1:] in ".:!;,":
            yield f"{where}: the heading ends with {heading[1].rstrip()[-1]!r}: leave it out"
        if heading and len(heading[1]) > HEADING_LENGTH:
            yield f"{where}: the heading has {len(heading[1])} characters, more than {HEADING_LENGTH}: shorten it"


def check_language(texts: list[Text], known: list[str]) -> Iterator[str]:
    """Say what Harper finds: words that are in no dictionary, wrong grammar, sentences of more than 40 words."""
    import harper

    linter = harper.Linter(harper.Dialect.BRITISH)
    linter.set_lint_config({rule: rule in (*GRAMMAR, SPELLING) for rule in harper.get_default_lint_config()})
    linter.import_words(known)
    for text in texts:
        prose = _prose_of(text.markdown)
        found = linter.organized_lints(prose.text)
        for rule, lint in ((key, lint) for key in text.rules for lint in found.get(key, ())):
            if rule == SPELLING and _is_known(lint.problem_text, known):
                continue
            line = prose.lines[prose.text.count("\n", 0, lint.span.start)]
            advice = f"; {lint.suggestions[0].replacement_text!r}?" if lint.suggestions else ""
            problem = " ".join(lint.problem_text.split())
            yield f"{text.file}:{line}: {problem[:80]!r}: {lint.message}{advice}"


def _is_known(word: str, known: list[str]) -> bool:
    """Return True if a word is a name such as bf16, a variable, or a listed word with 's."""
    return bool(re.search(r"\d", word)) or len(word.strip(".")) == 1 or word.removesuffix("'s") in known


def check_misspellings(root: Path) -> list[str]:
    """Say what codespell finds in pages, notebooks and code."""
    code = [path for folder in ("jaxshard", "examples", "benchmarks", "docs") for path in (root / folder).rglob("*.py")]
    files = ["README.md", *(source.file for source in sources(root)), *(str(path.relative_to(root)) for path in code)]
    options = ["--ignore-words-list", ",".join(NAMES_IN_CODE), "--ignore-regex", _STORED_PICTURE]
    command = [sys.executable, "-m", "codespell_lib", *options, *files]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return [f"{line} (codespell)" for line in result.stdout.splitlines()]


def without_code(markdown: str) -> str:
    """A page without blocks of code, addresses and tags; every line stays where it is."""
    return _HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), markdown)


class _Prose(NamedTuple):
    """The sentences of a page, each cell of a table as a paragraph, and the line of the page where each line stood."""

    text: str
    lines: list[int]


def _prose_of(markdown: str) -> _Prose:
    written: list[str] = []
    lines: list[int] = []
    for number, line in enumerate(without_code(markdown).splitlines(), 1):
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|")) if line.startswith("|") else [line]
        parts = [part for cell in cells for part in (cell.strip(), "")] if len(cells) > 1 else cells
        written += parts
        lines += [number] * len(parts)
    return _Prose("\n".join(written), lines)


def _texts(root: Path) -> Iterator[Text]:
    for file, _ in sources(root):
        if file in UNCHECKED:
            continue
        text = (root / file).read_text(encoding="utf-8")
        if file.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        yield Text(file, text)
    for name in public_names():
        for section in sections_of(name.docstring):
            if section.name not in ("Example", "References"):
                yield Text(f"{name.full}, {section.name or 'docstring'}", markdown(section), IN_DOCSTRINGS)
    yield Text("README.md", (root / "README.md").read_text(encoding="utf-8"))
