"""Dates as people write them: every text says its date, and no text says two."""

from __future__ import annotations

import random
from datetime import date

import pytest

from .conftest import example

dates = example("date_formats")
MAY_3RD = date(1979, 5, 3)


@pytest.mark.parametrize(
    ("language", "day", "text"),
    [
        ("English", MAY_3RD, "Thursday 3 May 1979"),
        ("English", MAY_3RD, "May 3rd, '79"),
        ("English", date(2001, 11, 11), "11th November 2001"),
        ("English", date(2001, 11, 22), "22nd November 2001"),
        ("figures", MAY_3RD, "03.05.79"),
        ("figures", MAY_3RD, "3/5/79"),
        ("figures", MAY_3RD, "3.V.1979"),
        ("French", MAY_3RD, "le jeudi 3 mai 1979"),
        ("French", date(2001, 8, 1), "1er août 2001"),
        ("German", MAY_3RD, "Donnerstag, den 3. Mai 1979"),
        ("Spanish", date(2001, 3, 1), "1º de marzo de 2001"),
        ("Italian", MAY_3RD, "3 maggio '79"),
        ("Portuguese", MAY_3RD, "quinta-feira, 3 de maio de 1979"),
        ("Dutch", MAY_3RD, "donderdag 3 mei 1979"),
        ("Chinese", MAY_3RD, "1979年5月3日 星期四"),
        ("Chinese", date(2010, 12, 31), "二〇一〇年十二月三十一日"),
        ("Chinese", date(1920, 10, 20), "一九二〇年十月二十日"),
        ("Japanese", MAY_3RD, "1979年05月03日(木)"),
    ],
)
def test_a_date_is_written_as_people_do(language: str, day: date, text: str) -> None:
    own = dates.LANGUAGES[language]
    assert text in [dates.write_as(day, own, template).text for template in own.formats]


def test_every_language_writes_every_date_and_no_text_stands_for_two() -> None:
    said: dict[str, date] = {}
    for day in random.Random(0).sample(dates.DATES, 1500):
        for language in dates.LANGUAGES.values():
            assert len(language.formats) >= 6
            for template in language.formats:
                if "{yy}" not in template or day.year in dates.SHORT_YEARS:
                    assert said.setdefault(dates.write_as(day, language, template).text, day) == day


def test_roles_say_which_characters_are_year_month_and_day() -> None:
    written = dates.write_as(MAY_3RD, dates.LANGUAGES["English"], "{weekday}, {month} {dth}, {yyyy}")
    assert written.text == "Thursday, May 3rd, 1979"
    assert written.roles == "          mmm ddd  yyyy"
    for number in range(300):
        one = dates.write(MAY_3RD, random.Random(number))
        assert len(one.roles) == len(one.text)
        assert {"y", "m", "d"} <= set(one.roles)


def test_the_alphabet_can_write_everything() -> None:
    rng, characters = random.Random(1), set(dates.alphabet())
    assert all(set(dates.write(day, rng).text) <= characters for day in rng.choices(dates.DATES, k=3000))


def test_the_generator_is_seeded() -> None:
    days = dates.DATES[:50]
    first, again, other = ([dates.write(day, rng) for day in days] for rng in map(random.Random, (3, 3, 4)))
    assert first == again != other
    assert dates.split_dates(3) == dates.split_dates(3) != dates.split_dates(4)


def test_held_out_dates_are_never_trained_on() -> None:
    training, validation, held_out = map(set, dates.split_dates(0))
    assert (len(validation), len(held_out)) == (500, 2000)
    assert not training & validation
    assert not held_out & (training | validation)
    assert training | validation | held_out == set(dates.DATES)
