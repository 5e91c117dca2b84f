"""Made-up pronunciations: a word of its own for each number, and its letters split by spaces."""

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


def _pair(number):
    word = "".join(SYLLABLES[number // len(SYLLABLES) ** place % len(SYLLABLES)] for place in range(3))
    return word, " ".join(word.upper())


PRONUNCIATIONS = [_pair(number) for number in range(4000)]
