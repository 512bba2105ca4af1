"""The one script that modules become."""

from __future__ import annotations

import pytest

from clearhead.errors import ArgumentError
from clearhead.plot._bundle import bundle


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
