"""Dates as people write them: every text says its date, and no text says two."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from datetime import date

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.positions import Rotary
from clearhead.transformer import Decoder, DecoderCache, DecoderLayer

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
    entry = dates.LANGUAGES[language]
    assert text in [dates.write_as(day, entry, template).text for template in entry.formats]


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


def test_the_generator_is_seeded_and_held_out_dates_are_never_trained_on() -> None:
    days = dates.DATES[:50]
    first, again, other = ([dates.write(day, rng) for day in days] for rng in map(random.Random, (3, 3, 4)))
    assert first == again != other
    assert dates.split_dates(3) == dates.split_dates(3) != dates.split_dates(4)
    training, validation, held_out = map(set, dates.split_dates(0))
    assert (len(validation), len(held_out)) == (500, 2000)
    assert not training & validation
    assert not held_out & (training | validation)
    assert training | validation | held_out == set(dates.DATES)


# Greedy and beam search: what they find is what trying everything finds, with caches and without.


searching = example("searching")
E, TOKENS, S, LONGEST, ROWS = 12, 4, 7, 3, 3
START, END = 0, 1


class Small(nn.Module):
    """A decoder over random memories, in float64 so that no two texts tie."""

    def __init__(self) -> None:
        super().__init__()
        attentions = clearhead.MultiHeadAttention(E, 3, position=Rotary(4)), clearhead.MultiHeadAttention(E, 3)
        self.embed, self.head = nn.Embedding(TOKENS, E), nn.Linear(E, TOKENS)
        nn.init.normal_(self.head.weight)
        self.decoder = Decoder([DecoderLayer(E, *attentions, nn.Linear(E, E))])
        self.double().eval()

    def encode(self, source: Tensor) -> Tensor:
        return self.embed(source)

    def decode(
        self, target: Tensor, memory: Tensor | None, source: Tensor, cache: Sequence[DecoderCache] | None = None
    ) -> Tensor:
        visible = masks.keep(keys=source != START)
        return self.head(
            self.decoder(self.embed(target), memory, mask=masks.causal(), memory_mask=visible, cache=cache)
        )


@pytest.fixture(name="model")
def _model() -> Small:
    return Small()


@pytest.fixture(name="source")
def _source() -> Tensor:
    source = torch.randint(2, TOKENS, (ROWS, S))
    source[1, 4:] = START  # padding
    return source


def until_end(row: Tensor) -> list[int]:
    tokens = row.tolist()
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@torch.no_grad()
def best_of_all(model: Small, source: Tensor) -> list[int]:
    """The likeliest text for one source (1, S) among all of at most LONGEST tokens, scored in one pass each."""
    texts = {tuple(until_end(torch.tensor(text))) for text in itertools.product(range(TOKENS), repeat=LONGEST)}

    def score(text: tuple[int, ...]) -> float:
        given = torch.tensor([[START, *text[:-1]]])
        logs = model.decode(given, model.encode(source), source).log_softmax(-1)[0]
        return logs[torch.arange(len(text)), torch.tensor(text)].sum().item()

    return list(max(texts, key=score))


cached = pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
seeds = pytest.mark.parametrize("seed", range(5))


@torch.no_grad()
def writer(model: Small, source: Tensor, cached: bool) -> object:
    return searching.CachedWriter(model, source, LONGEST) if cached else searching.UncachedWriter(model, source)


@cached
def test_a_beam_wide_enough_finds_the_likeliest_text(model: Small, source: Tensor, cached: bool) -> None:
    texts = searching.beam(writer(model, source, cached), START, END, LONGEST, TOKENS**LONGEST)
    assert [until_end(row) for row in texts] == [best_of_all(model, source[[row]]) for row in range(ROWS)]


@cached
@seeds
def test_a_beam_of_one_is_greedy(source: Tensor, cached: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = Small()
    beam = searching.beam(writer(model, source, cached), START, END, LONGEST, 1)
    greedy = searching.greedy(writer(model, source, cached), START, END, LONGEST)
    assert list(map(until_end, beam)) == list(map(until_end, greedy))


@pytest.mark.parametrize("width", [1, 2, 3])
@seeds
def test_caches_change_nothing(source: Tensor, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = Small()
    texts = [searching.beam(writer(model, source, kind), START, END, LONGEST, width) for kind in (True, False)]
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_cached_writer_projects_its_source_once(model: Small, source: Tensor) -> None:
    calls: list[int] = []
    model.decoder.layers[0].cross_attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    searching.beam(writer(model, source, True), START, END, LONGEST, 2)
    assert len(calls) == 1
