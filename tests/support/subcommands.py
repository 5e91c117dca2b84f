from metaphrase.scripts.__main__ import find_main
from metaphrase.scripts.parsers import parse


def name_of(subcommand):
    return subcommand if isinstance(subcommand, str) else subcommand.__name__.rpartition(".")[2]


def execute(subcommand, words):
    """Carry out a subcommand, given as its module or its name, with the words of a command line. Errors are exceptions."""
    name = name_of(subcommand)
    find_main(name)(parse(name, words))
