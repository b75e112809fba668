"""What authors check before they commit documents: `python -m tools.prose`.

Prints the idioms that CONTRIBUTING.md replaces, as far as a pattern can see them, and the number of
words of the guide. No test reads it: an honest paragraph or a right use of a word is no fault.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "configs" / "README.md"]
PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/evidence/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IDIOMS = re.compile(
    r"\b(alone|besides?|go(?:es)? on|went on|as of|mends?|in the mean|tells?|told|draws?|drawn)\b"
    r"|(?:^|[.:;] |- )Of \w+",
    re.MULTILINE,
)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = BLOCK.sub(lambda block: "\n" * block.group().count("\n"), text)
        text = re.sub(r"\| not \| but \|\n(\|.*\n)*", "", text)
        for number, line in enumerate(text.splitlines(), 1):
            for hit in IDIOMS.finditer(line):
                print(f"{page.relative_to(ROOT)}:{number}: {hit.group()}")
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in GUIDE)
    print(f"{words:,} words in the guide")


if __name__ == "__main__":
    main()
