"""What Zensical reads: the theme, the extensions and the navigation of one language."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .reference import SOURCES
from .staging import DOCS, NOTEBOOK_SCRIPT, TABLES_SCRIPT

PALETTE = [
    {"media": "(prefers-color-scheme: light)", "scheme": "default", "toggle": {"icon": "lucide/sun"}},
    {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "toggle": {"icon": "lucide/moon"}},
]
SWITCHES = {"en": ("Switch to the dark scheme", "Switch to the light scheme"), "zh": ("切换到深色", "切换到浅色")}
REFERENCE = "Reference: API"
PROJECT = [("Contributing", "contributing.md"), ("Security", "security.md"), ("Changes", "changelog.md")]
#: How mkdocstrings writes a public name. Modules are read, never imported.
HANDLER = {
    "paths": [str(SOURCES)],
    "options": {
        "docstring_style": "google",
        "extensions": [str(Path(__file__).with_name("docstrings.py"))],
        "heading_level": 2,
        "members_order": "source",
        "filters": ["!^_"],
        "inherited_members": False,
        "merge_init_into_class": True,
        "separate_signature": True,
        "show_signature_annotations": True,
        "show_overloads": False,
        "show_root_full_path": True,
        "show_root_heading": True,
        "show_source": False,
        "show_bases": False,
        "docstring_options": {"warn_unknown_params": False, "warn_missing_types": False},
    },
}


def navigation(language: str, reference: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The sections of the index with their pages, in its order; the reference after them."""
    index = (DOCS / language / "index.md").read_text(encoding="utf-8")
    listed: list[dict[str, Any]] = [{title_of(index): "index.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| \[([^\]]+)\]\((?!\.\./en/)((?:\.\./)*[\w/-]+\.md)\) \|", text, flags=re.MULTILINE)
        pages = [{name.replace("`", ""): re.sub(r"^(\.\./)+", "", path).lower()} for name, path in rows]
        if pages:
            listed.append({title.strip(): pages})
    if reference:
        listed.append({REFERENCE: [{name: place} for name, place in reference]})
        listed.append({"Project": [{name: place} for name, place in PROJECT]})
    return listed


def title_of(page: str) -> str:
    """The title of a page."""
    found = re.search(r"^# +(.+?) *$", page, flags=re.MULTILINE)
    return found[1] if found else "Clearhead"


def configuration(language: str, reference: list[tuple[str, str]]) -> dict[str, Any]:
    """The whole configuration of one language."""
    palette = [
        {**one, "toggle": one["toggle"] | {"name": name}} for one, name in zip(PALETTE, SWITCHES[language], strict=True)
    ]
    here, other = ("./", "./zh/") if language == "en" else ("../", "./")
    project: dict[str, Any] = {
        "site_name": "Clearhead",
        "use_directory_urls": True,
        "extra_css": ["extra.css"],
        "extra_javascript": [NOTEBOOK_SCRIPT.name, TABLES_SCRIPT.name],
        "nav": navigation(language, reference),
        "theme": {
            "language": language,
            "font": False,
            "palette": palette,
            "features": [
                "content.code.copy",
                "navigation.footer",
                "navigation.indexes",
                "navigation.sections",
                "navigation.top",
                "search.highlight",
            ],
        },
        "extra": {
            "generator": False,
            "alternate": [
                {"name": "English", "link": here, "lang": "en"},
                {"name": "中文", "link": other, "lang": "zh"},
            ],
        },
        "markdown_extensions": {
            "attr_list": {},
            "md_in_html": {},
            "tables": {},
            "toc": {"permalink": True},
            "pymdownx": {
                "highlight": {"pygments_lang_class": True},
                "inlinehilite": {},
                "superfences": {},
            },
        },
    }
    if language == "en":
        project["plugins"] = {"mkdocstrings": {"handlers": {"python": HANDLER}}}
    return {"project": project}
