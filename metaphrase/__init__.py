"""Sequence-to-sequence Transformers for the Hugging Face stack.

`import metaphrase` makes transformers' Auto classes know the models. The models are loaded, with faster kernels and the fast
decoder, when the Auto classes or another import need them.
"""

import importlib.abc
import importlib.machinery
import sys

__version__ = "0.1.0"
_CONFIGURATIONS = "transformers.models.auto.configuration_auto"


def __getattr__(name: str):
    if name != "MetaphraseConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from metaphrase.modeling import MetaphraseConfig

    return MetaphraseConfig


def _announce() -> None:
    """Add the model type to transformers' table of configurations, which loads a class when the type is looked up."""
    # `AutoConfig.register` needs the class itself, and so torch. Only the private tables take a name that is imported later.
    table = sys.modules[_CONFIGURATIONS].CONFIG_MAPPING
    table._mapping["metaphrase"] = "MetaphraseConfig"
    table._modules["metaphrase"] = sys.modules[__name__]


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that calls `_announce` after the import of transformers' table."""

    def find_spec(self, name, path=None, target=None):
        if name != _CONFIGURATIONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_announce(module) -> None:
            execute(module)
            _announce()

        spec.loader.exec_module = execute_and_announce
        return spec


if _CONFIGURATIONS in sys.modules:
    _announce()
else:
    sys.meta_path.insert(0, _Finder())
