from tiny_generator import tiny_generator

# Only line feeds separate lines. The other characters that Python counts as line ends stay inside a line.
ODD_LINES = ["a small\u2028dog runs", "the cat\rsleeps", "a\x85cat\x0b\x0c", "", " \t", "the dog\u2029"]


def targets_of(texts, **options):
    return tiny_generator(kind="byte").generate(texts, **options)


def as_lines(texts):
    return [text.replace("\r", " ").replace("\n", " ") for text in texts]


def damaged(compressed):
    """Return a compressed file with one changed byte, which cannot be decompressed."""
    return compressed[:12] + bytes([compressed[12] ^ 0xFF]) + compressed[13:]


def contents(folder):
    """Return the bytes of each file of a folder, by its path in the folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
