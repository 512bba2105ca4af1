"""``python -m docs.draw``: write every picture and the tables of statistics, commands, errors and terms.

It names every file that changed.
"""

from . import IMAGES, pictures
from .listed import COMMANDS, ERRORS, with_commands, with_errors
from .statistics import listed
from .terms import glossary, with_tables


def main() -> None:
    """Write every picture and the tables of statistics, commands, errors and terms."""
    page = IMAGES.parent / "en" / "statistics.md"
    texts = {IMAGES / name: draw().svg() for name, draw in pictures().items()}
    texts[page] = listed(page.read_text(encoding="utf-8"))
    for page, write in ((COMMANDS, with_commands), (ERRORS, with_errors)):
        texts[page] = write(page.read_text(encoding="utf-8"))
    for language in ("en", "zh"):
        page = glossary(language)
        texts[page] = with_tables(page.read_text(encoding="utf-8"), language)
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(IMAGES.parent.parent))


main()
