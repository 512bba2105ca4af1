"""``python -m docs.draw``: write every picture and the tables of statistics, and name the files that changed."""

from . import IMAGES, pictures
from .statistics import listed


def main() -> None:
    """Write every picture and the tables of statistics."""
    page = IMAGES.parent / "en" / "statistics.md"
    texts = {IMAGES / name: draw().svg() for name, draw in pictures().items()}
    texts[page] = listed(page.read_text(encoding="utf-8"))
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(IMAGES.parent.parent))


main()
