"""``python -m docs.draw``: write every picture, and name those that changed."""

from . import IMAGES, pictures


def main() -> None:
    """Write every picture."""
    for name, draw in pictures().items():
        path, svg = IMAGES / name, draw().svg()
        if path.exists() and path.read_text(encoding="utf-8") == svg:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")
        print(path.relative_to(IMAGES.parent.parent))


main()
