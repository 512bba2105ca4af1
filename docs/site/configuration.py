"""What Zensical reads: the theme, the extensions and the navigation of one language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.order import redirects, repository, sections

from .reference import INTERNAL, SOURCES
from .staging import SCRIPTS, sources

PALETTE: list[dict[str, Any]] = [
    {"media": "(prefers-color-scheme: light)", "scheme": "default", "toggle": {"icon": "lucide/sun"}},
    {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "toggle": {"icon": "lucide/moon"}},
]
SWITCHES = {"en": ("Switch to the dark scheme", "Switch to the light scheme"), "zh": ("切换到深色", "切换到浅色")}
REFERENCE = "API"
PROJECT = "Project"
#: How mkdocstrings writes a public name. Modules are read, never imported.
HANDLER = {
    "paths": [str(SOURCES)],
    "options": {
        "docstring_style": "google",
        "extensions": [str(Path(__file__).with_name("docstrings.py"))],
        "heading_level": 2,
        "members_order": "source",
        "filters": ["!^_", f"!^({INTERNAL})$"],
        "inherited_members": True,
        "line_length": 88,
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
    """The sections of docs/pages.toml with the pages that the language has; the reference before the project's."""
    places = sources(language).keys() | {"index.md"}
    listed: list[dict[str, Any]] = []
    for titles, pages in sections():
        if titles["en"] == PROJECT and reference:
            listed.append({REFERENCE: [{name: place} for name, place in reference]})
        if has := [place for place in pages if place in places]:
            listed.append({titles[language]: has})
    return listed


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
        "extra_javascript": [script.name for script in SCRIPTS],
        "nav": navigation(language, reference),
        "theme": {
            "language": language,
            "font": False,
            "palette": palette,
            "favicon": "images/favicon.svg",
            "features": [
                "content.code.copy",
                "navigation.footer",
                "navigation.indexes",
                "navigation.tabs",
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
    if repository():
        project["repo_url"] = repository()
    there = sources(language)
    moved = {old: new for old, new in redirects().items() if new.partition("#")[0] in there and old not in there}
    plugins: dict[str, Any] = {"redirects": {"redirect_maps": moved}}
    if language == "en":
        plugins["mkdocstrings"] = {"handlers": {"python": HANDLER}}
    project["plugins"] = plugins
    return {"project": project}
