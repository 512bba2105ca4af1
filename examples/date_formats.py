"""Dates as people write them: nine languages, many formats, drawn from a seeded generator.

    python examples/date_formats.py        # prints some

Ambiguous dates are read in one way throughout:

* With the day first or the year first, never the month in figures: ``03.05.79`` and ``3/5/1979`` are 3 May.
* A year of two digits is the one Python's ``%y`` makes of it: 69 … 99 are 1969 … 1999, 00 … 68 are 2000 … 2068. Other
  years are always written in full.
* One weekday in ten is drawn by lot: people get them wrong, and a date is what its day, month and year say.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

__all__ = ["DATES", "LANGUAGES", "Language", "Written", "alphabet", "split_dates", "write", "write_as"]

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
DATES = [FIRST + timedelta(days) for days in range((LAST - FIRST).days + 1)]
SHORT_YEARS = range(1969, 2069)
RANDOM_WEEKDAYS = 0.1

ROMAN = ["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII"]
CHINESE = "〇一二三四五六七八九"


@dataclass(frozen=True)
class Written:
    """A date as written by hand.

    Args:
        day: the date.
        text: what was written.
        roles: for each character of `text` what it says: ``y``, ``m`` or ``d``, or a blank.
    """

    day: date
    text: str
    roles: str


@dataclass(frozen=True)
class Language:
    """The words of a language and how it puts them together.

    Args:
        months, weekdays: in full, from January and from Monday.
        short_months, short_weekdays: as they are abbreviated.
        formats: templates; `FIELDS` says what stands in braces.
        ordinal: writes the day of the month as an ordinal number.
    """

    months: Sequence[str]
    short_months: Sequence[str]
    weekdays: Sequence[str]
    short_weekdays: Sequence[str]
    formats: Sequence[str]
    ordinal: Callable[[int], str] = str


def english_ordinal(day: int) -> str:
    ending = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def first_only(ending: str) -> Callable[[int], str]:
    """Languages in which only the first of a month is an ordinal number."""
    return lambda day: f"1{ending}" if day == 1 else str(day)


def chinese_number(number: int) -> str:
    """1 … 99: 七, 十, 十二, 二十, 三十一."""
    tens, ones = divmod(number, 10)
    before = "" if tens == 0 else "十" if tens == 1 else CHINESE[tens] + "十"
    return before + (CHINESE[ones] if ones else "")


Field = Callable[[date, Language, int], str]

#: What a field in braces is replaced by, and whether it says the year, the month, the day, or nothing that counts.
FIELDS: dict[str, tuple[str, Field]] = {
    "yyyy": ("y", lambda day, language, weekday: f"{day.year}"),
    "yy": ("y", lambda day, language, weekday: f"{day.year % 100:02d}"),
    "年": ("y", lambda day, language, weekday: "".join(CHINESE[int(figure)] for figure in str(day.year))),
    "mm": ("m", lambda day, language, weekday: f"{day.month:02d}"),
    "m": ("m", lambda day, language, weekday: f"{day.month}"),
    "roman": ("m", lambda day, language, weekday: ROMAN[day.month - 1]),
    "月": ("m", lambda day, language, weekday: chinese_number(day.month)),
    "month": ("m", lambda day, language, weekday: language.months[day.month - 1]),
    "mon": ("m", lambda day, language, weekday: language.short_months[day.month - 1]),
    "dd": ("d", lambda day, language, weekday: f"{day.day:02d}"),
    "d": ("d", lambda day, language, weekday: f"{day.day}"),
    "dth": ("d", lambda day, language, weekday: language.ordinal(day.day)),
    "日": ("d", lambda day, language, weekday: chinese_number(day.day)),
    "weekday": (" ", lambda day, language, weekday: language.weekdays[weekday]),
    "wd": (" ", lambda day, language, weekday: language.short_weekdays[weekday]),
}

TABLE = """
figures
    formats: {dd}.{mm}.{yy} | {d}.{m}.{yy} | {dd}.{mm}.{yyyy} | {d}.{m}.{yyyy} | {dd}/{mm}/{yy} | {d}/{m}/{yy} |
        {dd}/{mm}/{yyyy} | {d}/{m}/{yyyy} | {dd}-{mm}-{yyyy} | {d}-{m}-{yy} | {d} {m} {yyyy} |
        {yyyy}-{mm}-{dd} | {yyyy}/{m}/{d} | {yyyy}.{mm}.{dd} | {yyyy}{mm}{dd} | {d}.{roman}.{yyyy} |
        {d} {roman} {yyyy} | {d}.{roman}.{yy}
English
    months: January February March April May June July August September October November December
    short months: Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec
    weekdays: Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    short weekdays: Mon Tue Wed Thu Fri Sat Sun
    formats: {d} {month} {yyyy} | {dth} {month} {yyyy} | {month} {d}, {yyyy} | {month} {dth}, {yyyy} |
        {month} {dth}, '{yy} | {d} {month} '{yy} | the {dth} of {month} {yyyy} | {weekday} {d} {month} {yyyy} |
        {weekday}, {month} {dth}, {yyyy} | {wd} {d} {mon} {yyyy} | {wd}, {dd} {mon} {yyyy} | {d}-{mon}-{yy} |
        {dd} {mon} {yyyy} | {mon} {d}, '{yy} | {mon} {d} {yyyy} | {yyyy} {month} {d}
French
    months: janvier février mars avril mai juin juillet août septembre octobre novembre décembre
    short months: janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc.
    weekdays: lundi mardi mercredi jeudi vendredi samedi dimanche
    short weekdays: lun. mar. mer. jeu. ven. sam. dim.
    formats: {dth} {month} {yyyy} | le {dth} {month} {yyyy} | {weekday} {dth} {month} {yyyy} |
        le {weekday} {dth} {month} {yyyy} | {d} {mon} {yyyy} | {wd} {d} {mon} {yyyy} | {d} {month} {yy} |
        le {d} {month} '{yy} | {wd} {dd}/{mm}/{yy}
German
    months: Januar Februar März April Mai Juni Juli August September Oktober November Dezember
    short months: Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez.
    weekdays: Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag
    short weekdays: Mo Di Mi Do Fr Sa So
    formats: {dth} {month} {yyyy} | {weekday}, {dth} {month} {yyyy} | {weekday}, den {dth} {month} {yyyy} |
        den {dth} {month} '{yy} | {dth} {mon} {yyyy} | {dth} {month} '{yy} | {wd}, {d}.{m}.{yyyy} |
        {wd}, {dd}.{mm}.{yy} | {dth} {mon} {yy}
Spanish
    months: enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre
    short months: ene feb mar abr may jun jul ago sept oct nov dic
    weekdays: lunes martes miércoles jueves viernes sábado domingo
    short weekdays: lun mar mié jue vie sáb dom
    formats: {d} de {month} de {yyyy} | {weekday}, {d} de {month} de {yyyy} |
        {weekday} {d} de {month} de {yyyy} | {d} {mon} {yyyy} | {d} de {month} del {yyyy} |
        {dth} de {month} de {yyyy} | {wd} {d} {mon} {yyyy} | {d}-{mon}-{yy} | {d} de {month} de '{yy}
Italian
    months: gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre
    short months: gen feb mar apr mag giu lug ago set ott nov dic
    weekdays: lunedì martedì mercoledì giovedì venerdì sabato domenica
    short weekdays: lun mar mer gio ven sab dom
    formats: {d} {month} {yyyy} | {dth} {month} {yyyy} | {weekday} {d} {month} {yyyy} |
        {weekday}, {dth} {month} {yyyy} | {d} {mon} {yyyy} | {wd} {d} {mon} {yyyy} | {d} {month} '{yy} |
        il {dth} {month} {yyyy}
Portuguese
    months: janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro
    short months: jan. fev. mar. abr. mai. jun. jul. ago. set. out. nov. dez.
    weekdays: segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo
    short weekdays: seg. ter. qua. qui. sex. sáb. dom.
    formats: {d} de {month} de {yyyy} | {weekday}, {d} de {month} de {yyyy} | {dth} de {month} de {yyyy} |
        {d} de {mon} de {yyyy} | {wd}, {d} de {mon} de {yyyy} | {d} de {month} de '{yy} | {d} {mon} {yyyy}
Dutch
    months: januari februari maart april mei juni juli augustus september oktober november december
    short months: jan feb mrt apr mei jun jul aug sep okt nov dec
    weekdays: maandag dinsdag woensdag donderdag vrijdag zaterdag zondag
    short weekdays: ma di wo do vr za zo
    formats: {d} {month} {yyyy} | {weekday} {d} {month} {yyyy} | {d} {mon} {yyyy} | {wd} {d} {mon} {yyyy} |
        {d} {month} '{yy} | {d}-{mon}-{yyyy}
Chinese
    weekdays: 星期一 星期二 星期三 星期四 星期五 星期六 星期日
    short weekdays: 周一 周二 周三 周四 周五 周六 周日
    formats: {yyyy}年{m}月{d}日 | {yyyy}年{mm}月{dd}日 | {yyyy}年{m}月{d}号 | {yyyy} 年 {m} 月 {d} 日 |
        {yy}年{m}月{d}日 | {yyyy}年{m}月{d}日 {weekday} | {yyyy}年{m}月{d}日（{wd}） |
        {年}年{月}月{日}日 | {年}年{月}月{日}日{weekday}
Japanese
    weekdays: 月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日
    short weekdays: 月 火 水 木 金 土 日
    formats: {yyyy}年{m}月{d}日 | {yyyy}年{m}月{d}日({wd}) | {yyyy}年{m}月{d}日{weekday} | '{yy}年{m}月{d}日 |
        {yyyy}年{mm}月{dd}日({wd}) | {yyyy}/{mm}/{dd}({wd})
"""

ORDINALS: dict[str, Callable[[int], str]] = {
    "English": english_ordinal,
    "French": first_only("er"),
    "German": lambda day: f"{day}.",
    "Spanish": first_only("º"),
    "Italian": first_only("°"),
    "Portuguese": first_only("º"),
}


def read_languages(table: str) -> dict[str, Language]:
    """Languages from a text: a name, and below it, further in, its words and formats."""
    languages: dict[str, Language] = {}
    for found in re.finditer(r"^(\w+)\n((?: .+\n)+)", table, re.MULTILINE):
        entries = dict(re.findall(r"^    ([\w ]+): ((?:.+\n)(?:     .+\n)*)", found[2], re.MULTILINE))
        words = {name: tuple(text.split()) for name, text in entries.items()}
        languages[found[1]] = Language(
            words.get("months", ()),
            words.get("short months", ()),
            words.get("weekdays", ()),
            words.get("short weekdays", ()),
            tuple(template.strip() for template in entries["formats"].split("|")),
            ORDINALS.get(found[1], str),
        )
    return languages


LANGUAGES = read_languages(TABLE)
_FIELD = re.compile(r"\{(\w+)\}")


def write_as(day: date, language: Language, template: str, weekday: int | None = None) -> Written:
    """Write a date in one format.

    Args:
        day: the date.
        language: whose words are used.
        template: one of ``language.formats``.
        weekday: from 0, Monday; default the date's own.
    """
    weekday = day.weekday() if weekday is None else weekday
    text, roles = "", ""
    for number, piece in enumerate(_FIELD.split(template)):
        role, field = FIELDS[piece] if number % 2 else (" ", None)
        written = piece if field is None else field(day, language, weekday)
        text, roles = text + written, roles + role * len(written)
    return Written(day, text, roles)


def write(day: date, rng: random.Random) -> Written:
    """Write a date in a language and a format drawn by `rng`."""
    language = LANGUAGES[rng.choice(list(LANGUAGES))]
    formats = [template for template in language.formats if "{yy}" not in template or day.year in SHORT_YEARS]
    weekday = rng.randrange(7) if rng.random() < RANDOM_WEEKDAYS else None
    return write_as(day, language, rng.choice(formats), weekday)


def split_dates(seed: int, *, validation: int = 500, held_out: int = 2000) -> tuple[list[date], list[date], list[date]]:
    """All dates from 1900 to 2099 in three parts that share none: training, validation, held out."""
    shuffled = random.Random(seed).sample(DATES, len(DATES))
    return shuffled[validation + held_out :], shuffled[:validation], shuffled[validation : validation + held_out]


def alphabet() -> str:
    """Every character that a date can be written with."""
    texts = [string.digits, *ROMAN, CHINESE, "十"]
    for language in LANGUAGES.values():
        texts += [*language.months, *language.short_months, *language.weekdays, *language.short_weekdays]
        texts += [language.ordinal(day) for day in range(1, 32)]
        texts += [_FIELD.sub("", template) for template in language.formats]
    return "".join(sorted(set("".join(texts))))


def main() -> None:
    rng = random.Random(0)
    for day in rng.sample(DATES, 20):
        print(f"{day}  {write(day, rng).text}")


if __name__ == "__main__":
    main()
