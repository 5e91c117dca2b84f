"""Normalization: a sentence with numbers, dates, times and sums of money becomes the words that a reader says.

The task is known from the text normalization of Sproat and Jaitly 2016 (arXiv 1611.00068). The sentences come from
templates, in lower case and without punctuation on the target side.
"""

# ruff: noqa: SIM905 (words are read more easily in one string)

import random

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen""".split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
MONTHS = """January February March April May June July August September October November December""".split()
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
}
UNITS = {
    "km": "kilometers",
    "kg": "kilograms",
    "cm": "centimeters",
    "mph": "miles per hour",
    "%": "percent",
    "°C": "degrees celsius",
}
NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas".split()
THINGS = "the parcel,the bicycle,the ticket,this book,her old car,the second room,a new phone,the red lamp".split(",")
EVENTS = "the meeting,the concert,our flight,the exam,the match,her visit,the next train,the tour".split(",")


def cardinal(number: int) -> str:
    """Return a number below a billion in words."""
    for size, name in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return f"{cardinal(number // size)} {name}" + (f" {cardinal(rest)}" if rest else "")
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")


def ordinal(number: int) -> str:
    """Return an ordinal number below a billion in words."""
    *head, last = cardinal(number).split()
    last = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return " ".join([*head, last])


def year(number: int) -> str:
    """Return a year from 1100 to 2099 in words: nineteen oh five, two thousand six, twenty twenty."""
    century, rest = divmod(number, 100)
    if 2000 <= number < 2010:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} oh {ONES[rest]}" if rest < 10 else f"{cardinal(century)} {cardinal(rest)}"


def _number(draw: random.Random) -> tuple[str, str]:
    value = draw.randrange(10 ** draw.randint(1, 7))
    written = f"{value:,}" if draw.random() < 0.7 else str(value)
    if draw.random() < 0.2:
        decimals = str(draw.randrange(1, 100))
        return f"{written}.{decimals}", f"{cardinal(value)} point {' '.join(ONES[int(digit)] for digit in decimals)}"
    return written, cardinal(value)


def _measure(draw: random.Random) -> tuple[str, str]:
    unit, name = draw.choice(list(UNITS.items()))
    written, spoken = _number(draw)
    return f"{written} {unit}" if unit.isalpha() else f"{written}{unit}", f"{spoken} {name}"


def _ordinal(draw: random.Random) -> tuple[str, str]:
    value = draw.randint(1, 120)
    suffix = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value}{suffix}", ordinal(value)


def _date(draw: random.Random) -> tuple[str, str]:
    day, month, number = draw.randint(1, 28), draw.randint(1, 12), draw.randint(1700, 2060)
    name = MONTHS[month - 1]
    written = draw.choice(
        [
            f"{name} {day}, {number}",
            f"{name[:3]}. {day}, {number}",
            f"{month}/{day}/{number}",
            f"{number}-{month:02}-{day:02}",
        ]
    )
    return written, f"{name.lower()} {ordinal(day)} {year(number)}"


def _time(draw: random.Random) -> tuple[str, str]:
    hour, minute = draw.randint(0, 23), draw.choice([0, 0, 15, 30, 45, draw.randint(1, 59)])
    half_of_day, spoken_half = ("am", "a m") if hour < 12 else ("pm", "p m")
    spoken_minute = "" if minute == 0 else f" oh {ONES[minute]}" if minute < 10 else f" {cardinal(minute)}"
    hour_of_half = (hour - 1) % 12 + 1
    written = f"{hour:02}:{minute:02}" if draw.random() < 0.4 else f"{hour_of_half}:{minute:02} {half_of_day}"
    return written, f"{cardinal(hour_of_half)}{spoken_minute} {spoken_half}"


def _money(draw: random.Random) -> tuple[str, str]:
    sign, (unit, units, hundredth, hundredths) = draw.choice(list(CURRENCIES.items()))
    whole, cents = draw.randrange(1, 10 ** draw.randint(1, 5)), draw.choice([0, 0, draw.randint(1, 99)])
    spoken = f"{cardinal(whole)} {unit if whole == 1 else units}"
    if not cents:
        return f"{sign}{whole:,}", spoken
    return f"{sign}{whole:,}.{cents:02}", f"{spoken} and {cardinal(cents)} {hundredth if cents == 1 else hundredths}"


TEMPLATES = (
    ("{event} is on {0} at {1}.", (_date, _time)),
    ("{event} was moved from {0} to {1}.", (_date, _date)),
    ("{event} starts at {0} and ends at {1}.", (_time, _time)),
    ("{name} paid {0} for {thing}.", (_money,)),
    ("{thing} costs {0}, not {1}.", (_money, _money)),
    ("{name} was born on {0}.", (_date,)),
    ("{name} came {0} of {1}.", (_ordinal, _number)),
    ("there were {0} people at {event} on {1}.", (_number, _date)),
    ("{thing} weighs about {0}.", (_measure,)),
    ("{name} and {name2} saw {0} after {1}.", (_measure, _time)),
    ("{0}", (_number,)),
    ("{0}", (_date,)),
    ("{0}", (_money,)),
)


def make_pair(draw: random.Random) -> tuple[str, str]:
    """Return a sentence as written and as spoken."""
    template, kinds = draw.choice(TEMPLATES)
    written, spoken = zip(*(kind(draw) for kind in kinds), strict=True)
    words = {
        "event": draw.choice(EVENTS),
        "thing": draw.choice(THINGS),
        "name": draw.choice(NAMES),
        "name2": draw.choice(NAMES),
    }
    source, target = template.format(*written, **words), template.rstrip(".").format(*spoken, **words)
    return source[0].upper() + source[1:], target.replace(",", "").lower()


def make_splits(num_train: int = 20_000, seed: int = 2) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split. No source occurs twice."""
    draw, pairs = random.Random(seed), {}
    while len(pairs) < num_train + 1500:
        pairs.update([make_pair(draw)])
    pairs = list(pairs.items())
    draw.shuffle(pairs)
    return {"train": pairs[1500:], "validation": pairs[:500], "test": pairs[500:1500]}
