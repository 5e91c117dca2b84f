"""A verb of the command line, carried out in this process."""

from metaphrase.scripts.parsers import parse


def name_of(verb):
    """Return the name of a verb from its module."""
    return verb.__name__.rpartition(".")[2]


def execute(verb, words):
    """Carry out a verb, given as its module, with the words of a command line. Errors are exceptions."""
    verb.main(parse(name_of(verb), words))
