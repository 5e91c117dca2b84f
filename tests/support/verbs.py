"""A verb of the command line, carried out in this process."""

from metaphrase.scripts.__main__ import find_main
from metaphrase.scripts.parsers import parse


def name_of(verb):
    """Return the name of a verb from its module."""
    return verb.__name__.rpartition(".")[2]


def execute(verb, words):
    """Carry out a verb, given as its module or its name, with the words of a command line. Errors are exceptions."""
    name = verb if isinstance(verb, str) else name_of(verb)
    find_main(name)(parse(name, words))
