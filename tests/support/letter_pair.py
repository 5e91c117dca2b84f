SOURCE_END, TARGET_END = 1, 2


class LetterPair:
    """One id for each letter (spaces have none), then the end."""

    def encode_sources(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text if letter not in " ~"] + [SOURCE_END] for text in texts]

    def encode_targets(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text if letter not in " ~"] + [TARGET_END] for text in texts]
