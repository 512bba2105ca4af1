"""The modules of the page: what they import, and the one script that they become."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import plot
from clearhead.errors import ArgumentError
from clearhead.plot._bundle import bundle, parsed

from .browsing import needs_chromium, wait_until
from .javascript import names

FOLDER = Path(plot.__file__).parent
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*_*.js"))}
MODULES = {file: parsed(file, text) for file, text in TEXTS.items()}


def imported(file: str) -> Iterator[str]:
    for of_one_file in MODULES[file].imports.values():
        yield from of_one_file


def modules_of(entry: str) -> list[str]:
    """The modules of a page."""
    read: list[str] = []

    def remembered(file: str) -> str:
        read.append(file)
        return TEXTS[file]

    script = bundle(entry, remembered)
    assert len(script) == sum(len(MODULES[file].code) for file in read)
    return read


OF_PAGES = {entry: modules_of(entry) for entry in ("page_main.js", "census_main.js")}


def test_the_pages_hold_every_module_of_their_own() -> None:
    assert sorted({*chain(*OF_PAGES.values())}) == list(TEXTS)
    for entry, files in OF_PAGES.items():
        own = [file for file in TEXTS if file.startswith(entry.partition("_")[0])]
        assert set(own) <= set(files)


@pytest.mark.parametrize(("entry", "file"), [(entry, file) for entry, files in OF_PAGES.items() for file in files])
def test_a_module_imports_what_it_uses_of_others_and_nothing_else(entry: str, file: str) -> None:
    """A local variable may not be called like something of another module of its page, so that this is exact."""
    declared = {name for each in OF_PAGES[entry] for name in MODULES[each].declared}
    used = names(MODULES[file].code)
    assert used & declared - {*MODULES[file].declared} == {*imported(file)}
    assert len([*imported(file)]) == len({*imported(file)})


def test_every_export_is_imported() -> None:
    exported = {name for module in MODULES.values() for name in module.exported}
    assert exported == {name for file in TEXTS for name in imported(file)}


def test_names_are_neither_properties_keys_nor_texts() -> None:
    source = """
      // comment
      /* another */ const { key: local, short } = one.property?.another(...spread); // key: local
      const text = "string" + 'string\\'' + `template ${inner({ key: `${deep} template` })} template` + last;
      const pattern = first / 2 / half, found = /regex[/"]more/u.exec(subject);
      return chosen ? yes : no;
    """
    keywords = {"const", "return"}
    locals_ = {"local", "short", "text", "pattern", "found"}
    free = {"one", "spread", "inner", "deep", "last", "first", "half", "subject", "chosen", "yes", "no"}
    assert names(source) == keywords | locals_ | free


def test_modules_follow_what_they_import_in_the_order_of_the_imports() -> None:
    files = {
        "main.js": 'import { b } from "./b.js";\nimport {\n  a,\n  one,\n} from "./a.js";\n\nb(a, one);\n',
        "a.js": 'import { base } from "./base.js";\nexport let a = base;\nexport async function one() {}\n',
        "b.js": 'import { base } from "./base.js";\nexport const b = () => base;\nconst private_ = "export const";\n',
        "base.js": "// what both need\nexport const base = 1;\n",
    }
    assert bundle("main.js", files.__getitem__) == (
        "// what both need\nconst base = 1;\n"
        'const b = () => base;\nconst private_ = "export const";\n'
        "let a = base;\nasync function one() {}\n"
        "\nb(a, one);\n"
    )


FORMS = [
    'import a from "./a.js";',
    'import * as a from "./a.js";',
    'import { a as b } from "./a.js";',
    'import "./a.js";',
    'import { a } from "a";',
    "import { a } from './a.js';",
    '  import { a } from "./a.js";',
    'const { a } = await import("./a.js");',
    "console.log(import.meta.url);",
    "export default a;",
    "export { a };",
    'export * from "./a.js";',
    "export const { a } = b;",
    "export let a, b;",
    "let a, b;",
    "export class A {}",
    "class A {}",
    "var a = 1;",
    "export function* a() {}",
]


@pytest.mark.parametrize("form", FORMS)
def test_another_form_is_refused(form: str) -> None:
    files = {"main.js": f"const one = 1;\n{form}\n", "a.js": "export const a = 1;\n"}
    with pytest.raises(ArgumentError) as refused:
        bundle("main.js", files.__getitem__)
    assert str(refused.value).startswith('main.js: expected import { … } from "./file.js"; and (export) function')
    assert form.strip().rpartition("await ")[2].removeprefix("console.log(") in str(refused.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"main.js": 'import { a, b } from "./a.js";\n', "a.js": "export const a = 1;\nconst b = 2;\n"},
            "main.js: expected imports of names that a.js exports, got b.",
        ),
        (
            {
                "main.js": 'import { a } from "./a.js";\nimport { b } from "./b.js";\n',
                "a.js": "export const a = 1;\nconst size = 2;\n",
                "b.js": "export const b = 1;\nfunction size() {}\n",
            },
            "b.js: expected names that no module of the page declares before, got size, which is in a.js.",
        ),
        (
            {"main.js": "export const a = 1;\nexport function a() {}\n"},
            "main.js: expected names that no module of the page declares before, got a, which is in main.js.",
        ),
        (
            {
                "main.js": 'import { a } from "./a.js";\n',
                "a.js": 'import { b } from "./b.js";\nexport const a = 1;\n',
                "b.js": 'import { a } from "./a.js";\nexport const b = 1;\n',
            },
            "b.js: expected imports without a circle, got a.js → b.js → a.js. "
            "Move what both need to a module of its own.",
        ),
    ],
)
def test_a_missing_export_a_second_declaration_and_a_circle_are_refused(files: dict[str, str], words: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        bundle("main.js", files.__getitem__)
    assert str(refused.value) == words


@needs_chromium
def test_the_modules_run_in_a_browser_as_they_are(browser: Any) -> None:
    page = plot.page(plot.given([torch.eye(5).expand(2, 3, 5, 5)]), list("abcde")).text
    start, end = page.rindex("<script>"), page.rindex("</script>")
    page = page[:start] + '<script type="module" src="page_main.js">' + page[end:]
    policy = page.index("<meta http-equiv")
    page = page[:policy] + page[page.index("\n", policy) :]

    def served(route: Any) -> None:
        file = route.request.url.rpartition("/")[2]
        kind = "text/javascript" if file else "text/html"
        route.fulfill(body=TEXTS[file] if file else page, content_type=f"{kind}; charset=utf-8")

    opened = browser.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.route("http://page.test/**", served)
    opened.goto("http://page.test/")
    wait_until(opened, "document.documentElement.dataset.ready || false")
    assert opened.locator("#overview button").count() == 3
    assert errors == []
    opened.close()
