"""The built site has every page and every public name, leads somewhere everywhere, and loads nothing from elsewhere."""

from __future__ import annotations

import html
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

import clearhead
from docs.order import redirects
from docs.site.models import RESULTS
from docs.site.reference import FIRST, INTERNAL, MODULES, place_of
from docs.site.staging import address, sources
from tests.plot.pages import Elements
from tests.test_public_surface import PUBLIC, SURFACE, WITHOUT_EXAMPLE

#: Public modules without a page: they have no names, or are a command.
WITHOUT_PAGE = {"clearhead.cli", "clearhead.inspection", "clearhead.integrations"}
#: Abstract classes: the page has their methods instead of the signature of a constructor.
MEMBERS_ONLY = {"Scaling", "Cache", "EvictionPolicy", "Kernel"}
#: A table, what only Clearhead makes, Python's own warnings.
WITHOUT_SIGNATURE = {"NAMINGS", "AttentionStatistics", "AttentionHealthWarning", "UnseenAttentionWarning"}
SUBMODULES = {name.rpartition(".")[2] for name in SURFACE}
NAMES = [pair for pair in PUBLIC if pair[0] in MODULES and pair[1] not in {*SUBMODULES, "__version__"}]
LOADING = ("stylesheet", "icon", "preconnect", "preload", "modulepreload")


class Built(NamedTuple):
    """What a test reads of a page: the text of its article, where it leads, its anchors, what it loads."""

    text: str
    links: list[str]
    anchors: set[str]
    loaded: list[str]


@cache
def built(page: Path) -> Built:
    source = page.read_text(encoding="utf-8")
    article = "".join(re.findall(r"<article.*?</article>", source, re.DOTALL))
    text = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", "", article, flags=re.DOTALL)
    tags = [(tag, {name: value or "" for name, value in given.items()}) for tag, given in Elements(source).tags]
    links = [given["href"] for tag, given in tags if tag == "a" and "href" in given]
    anchors = {given["id"] for _, given in tags if "id" in given}
    loaded = [given["src"] for tag, given in tags if tag in ("img", "script", "iframe", "source") and "src" in given]
    loaded += [given["href"] for tag, given in tags if tag == "link" and given.get("rel") in LOADING]
    return Built(html.unescape(text), links, anchors, loaded)


def test_every_public_module_has_a_page() -> None:
    assert set(MODULES) == set(SURFACE) - WITHOUT_PAGE


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_has_a_signature_and_an_example(site: Path, module: str, name: str) -> None:
    page = site / address(place_of(module)) / "index.html"
    source = page.read_text(encoding="utf-8")
    starts = [match.start() for match in re.finditer(r'<h2 id="[^"]+" class="doc doc-heading', source)] + [len(source)]
    sections = [source[start:end] for start, end in itertools.pairwise(starts)]
    (section,) = (part for part in sections if part.startswith(f'<h2 id="{module}.{name}"'))
    text = re.sub(r"<[^>]+>", "", section)
    assert len(text.split()) > 15, text
    if name in MEMBERS_ONLY:
        assert re.search(rf'id="{module}.{name}\.\w+" class="doc doc-heading', section)
    elif name not in WITHOUT_SIGNATURE:
        assert re.search(rf'doc-signature.*?<span class="n[a-z]*">{name}</span>', section, re.DOTALL)
    if module != "clearhead.errors" and name not in WITHOUT_EXAMPLE:
        assert re.search(r'language-pycon highlight.*?<span class="gp">', section, re.DOTALL)


def rows_of(source: str) -> Iterator[tuple[str, str, str]]:
    """The callable, the name and the default of every row of the tables of parameters of a page of the reference."""
    named = re.compile(r'<h\d id="(clearhead[\w.]*)" class="doc doc-heading')
    starts = [(match.start(), match[1]) for match in named.finditer(source)] + [(len(source), "")]
    for (start, name), (end, _) in itertools.pairwise(starts):
        for table in re.findall(r"Parameters:</span></p>\s*<table>(.*?)</table>", source[start:end], re.DOTALL):
            for row in re.findall(r'<tr class="doc-section-item">(.*?)</tr>', table, re.DOTALL):
                cells = re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
                texts = [html.unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in cells]
                yield name, texts[0], texts[-1]


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    parts = name.split(".")
    found: Any = clearhead
    for place, part in enumerate(parts[1:], 2):
        found = (
            importlib.import_module(".".join(parts[:place])) if name_is_module(parts[:place]) else getattr(found, part)
        )
    return dict(inspect.signature(found).parameters)


def name_is_module(parts: list[str]) -> bool:
    return ".".join(parts) in SURFACE


@pytest.mark.parametrize("module", MODULES)
def test_a_parameter_has_a_row_of_its_own_and_is_required_only_if_it_is(site: Path, module: str) -> None:
    source = (site / address(place_of(module)) / "index.html").read_text(encoding="utf-8")
    for name, parameter, default in rows_of(source):
        known = parameters_of(name)
        assert parameter.lstrip("*") in known, f"{name}: {parameter}"
        required = known[parameter.lstrip("*")].default is inspect.Parameter.empty
        assert (default == "required") <= required, f"{name}: {parameter} is {default}"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_page_was_built_with_its_text(site: Path, language: str) -> None:
    root = site if language == "en" else site / language
    for place, source in sources(language).items():
        page = root / address(place) / "index.html"
        shown = re.sub(r"\s", "", built(page).text)
        written = re.sub(r"[\s`*#|]|\]\([^)]*\)|<!--.*?-->", "", source.read_text(encoding="utf-8"))
        assert len(shown) > 0.6 * len(written), f"{place}: {len(shown)} of {len(written)} characters"


def test_the_reference_begins_with_what_most_programs_use_and_has_no_internal_names(site: Path) -> None:
    for module in MODULES:
        source = (site / address(place_of(module)) / "index.html").read_text(encoding="utf-8")
        named = re.findall(rf'<h\d id="{module}\.([\w.]+)" class="doc doc-heading', source)
        assert not [name for name in named if re.fullmatch(INTERNAL, name.rpartition(".")[2])]
        if module == "clearhead":
            assert [name for name in named if "." not in name][: len(FIRST)] == list(FIRST)
            assert {"record.weights", "record.rank_heads", "record.summary", "record.page"} < set(named)
    assert MODULES[:2] == ("clearhead", "clearhead.masks")


def test_old_addresses_lead_to_pages(site: Path) -> None:
    moved = redirects()
    assert len(moved) > 10
    for old, new in moved.items():
        page = (site / address(old) / "index.html").read_text(encoding="utf-8")
        found = re.search(r'http-equiv="refresh" content="0; *url=([^"]+)"', page)
        assert found is not None, old
        target = (site / address(old) / found[1].partition("#")[0]).resolve()
        assert target == (site / address(new.partition("#")[0])).resolve(), old


def test_every_type_has_a_row_in_the_table_of_models(site: Path) -> None:
    page = (site / "models" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr><td><code>(.*?)</code></td><td>(.*?)</td>", re.sub("<wbr>", "", page))
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]
    assert len(rows) == len({name for name, _ in rows}) == sum(map(sum, figures["counts"].values()))
    assert dict(rows)["llama"] == "agrees"
    assert {name for name, result in rows if result == "refused"} == set(figures["refused"])


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    wrong: list[str] = []
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 40
    for page in pages:
        for link in built(page).links:
            if re.match(r"(https?|mailto|javascript):", link):
                continue
            path, _, anchor = link.partition("#")
            other = (page.parent / unquote(path)).resolve() if path else page
            other = other / "index.html" if other.is_dir() else other
            if not other.is_file():
                wrong.append(f"{page.relative_to(site)}: {link}")
            elif anchor and other.suffix == ".html" and unquote(anchor) not in built(other).anchors | {"__top"}:
                wrong.append(f"{page.relative_to(site)}: no anchor {link}")
    assert not wrong, "\n".join(wrong)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for loaded in built(page).loaded:
            assert not re.match(r"(https?:)?//", loaded), f"{page.relative_to(site)}: {loaded}"
