"""Plain English: habits that readers stumbled over, found in pages, docstrings and messages.

`python -m tests.plain` prints each find, and the pages whose sentences are too long in the mean.
The patterns are those that are nearly always wrong; a reader finds the others.
"""

import ast
import re
import sys

from tests.processes import ROOT

HABITS = {
    r"\bbut (for|in|of)\b": "except, or except in",
    r"\b(is|are|was) said\b": "prints, reports, logs: who does it?",
    r"(?:^|[.!?] )Of (?:an?|the|its|each|all|what|one|two|those|[a-z]+s)\b": "the subject first",
    r"\b(is|are) here\b": "exists, is installed, is on this machine",
    r"\bfor all time\b|\bno fewer of\b|\bof what there is\b": "say it in common words",
}
MOST_WORDS = 20
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(text):
    """A page without code, comments, tables and addresses of links, a paragraph a line."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\s*(\|.*|#.*|<.*|!\[.*)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def mean_words(text):
    """Words of a sentence in the mean."""
    ends = re.compile(r"(?<=[.!?:;]) (?=[A-Z`\[*\"])")
    sentences = [sentence for part in prose(text) for sentence in ends.split(part)]
    return sum(len(s.split()) for s in sentences) / max(1, len(sentences))


def texts(path):
    """Line and text of a page, or of a module's docstrings and strings of words."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def finds(text):
    """Each habit in a text: after how many lines, the words, and what to write instead."""
    joined = re.sub(r"(?<=[^\n])\n(?=[^\n|#*-])", " ", text)  # a sentence may go on in a line
    for pattern, instead in HABITS.items():
        for found in re.finditer(pattern, joined, re.MULTILINE):
            yield text.count("\n", 0, found.start()), found[0].strip(" .!?"), instead


def main():
    """Print what is found; 1 where something is."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line + below}: {found!r}: {instead}"
        for path in (*PAGES, *sorted((ROOT / "flexattn").rglob("*.py")))
        for line, text in texts(path)
        for below, found, instead in finds(text)
    ]
    for page in PAGES:
        if (mean := mean_words(page.read_text(encoding="utf-8"))) > MOST_WORDS:
            name = page.relative_to(ROOT)
            wrong.append(f"{name}: {mean:.1f} words in a sentence, at most {MOST_WORDS}")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
