"""A small corpus: dates in words, and the same in digits."""

from __future__ import annotations

import datetime
import random

import numpy as np

FIRST_DAY = datetime.date(1900, 1, 1)
DAYS = 73049  # to the end of 2099

MONTHS, ORDINALS, NUMBERS, TENS = map(
    str.split,
    (
        "january february march april may june july august september october november december",
        "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth "
        "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth",
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    ),
)

WORDS = sorted(
    {*MONTHS, *ORDINALS, *NUMBERS, *TENS, "thirtieth", "hundred", "oh", "the", "of"}
)
CHARACTERS = "0123456789-"
# The target's alphabet, besides: where a translation begins and where it ends.
BEGIN, END = len(CHARACTERS), len(CHARACTERS) + 1

# Word numbers and character numbers: int32 of any length.
Pair = tuple[np.ndarray, np.ndarray]


def in_words(date: datetime.date, day_first: bool) -> list[str]:
    """1987-03-21 as "the twenty first of march nineteen eighty seven", or the month first."""
    month, day, year = MONTHS[date.month - 1], _ordinal(date.day), _year(date.year)
    return ["the", *day, "of", month, *year] if day_first else [month, *day, *year]


def _ordinal(day: int) -> list[str]:
    if day <= 20:
        return [ORDINALS[day - 1]]
    return ["thirtieth"] if day == 30 else [TENS[day // 10 - 2], ORDINALS[day % 10 - 1]]


def _year(year: int) -> list[str]:
    century, rest = divmod(year, 100)
    first = "nineteen" if century == 19 else "twenty"
    if rest == 0:
        return [first, "hundred"]
    if rest < 10:
        return [first, "oh", NUMBERS[rest - 1]]
    if rest < 20:
        return [first, NUMBERS[rest - 1]]
    return [
        first,
        TENS[rest // 10 - 2],
        *([NUMBERS[rest % 10 - 1]] if rest % 10 else []),
    ]


def make_corpus(n_train: int, n_test: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to learn from, and pairs of other days to be tested with."""
    draw = random.Random(seed)
    days = draw.sample(range(DAYS), n_train + n_test)
    pairs = [
        _pair(FIRST_DAY + datetime.timedelta(days=day), day_first=draw.random() < 0.5)
        for day in days
    ]
    return pairs[:n_train], pairs[n_train:]


def _pair(date: datetime.date, day_first: bool) -> Pair:
    source = [WORDS.index(word) for word in in_words(date, day_first)]
    target = [CHARACTERS.index(character) for character in date.isoformat()]
    return np.array(source, np.int32), np.array(target, np.int32)


def words_of(source: np.ndarray) -> str:
    return " ".join(WORDS[number] for number in source)


def characters_of(target: np.ndarray) -> str:
    return "".join(CHARACTERS[number] for number in target if number < len(CHARACTERS))
