"""`clearhead look --lang zh`: the same numbers, described in Chinese."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clearhead.plot import _fonts
from clearhead.plot._language import language_now, speaking

from .looking import contents, look

TEXT = "Time flies."
ENGLISH = re.compile(
    r"\b(?:layers?|heads?|tokens?|query|queries|keys?|weights?|entropy|wrote|took|nats)\b", re.IGNORECASE
)


@pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")
class TestChinese:
    def test_terminal_page_and_numbers(self) -> None:
        result = look(TEXT, "--lang", "zh", "--no-png", "--json", "zh.json")
        assert result.exit_code == 0, result.output
        assert not ENGLISH.search(re.sub(r"--(layer|head)\b", "", result.stdout)), result.stdout
        assert "6 层 × 12 个头 · 5 个词元" in result.stdout
        assert language_now() == "en"
        page = contents(Path("attention.html"))
        assert page.data["sections"][0]["title"] == "自注意力"
        assert page.data["words"]["{0} heads"] == "{0} 个头"
        english = look(TEXT, "--no-png", "--no-html", "--json", "en.json")
        assert english.exit_code == 0, english.output
        assert json.loads(Path("zh.json").read_text()) == json.loads(Path("en.json").read_text())

    def test_an_unknown_language(self) -> None:
        result = look(TEXT, "--lang", "fr")
        assert result.exit_code == 2
        assert "--lang: expected en or zh, got 'fr'" in " ".join(result.stderr.split())


def test_a_picture_is_in_english_where_no_font_has_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: list[str] = []
    for has in (frozenset(range(0x20000)), frozenset(range(128))):
        monkeypatch.setattr(_fonts, "characters_of", lambda family, has=has: has)
        with speaking("zh"), _fonts.drawable_language():
            spoken.append(language_now())
    assert spoken == ["zh", "en"]
