"""Sequence-to-sequence Transformers for the Hugging Face stack.

`import metaphrase` makes transformers' Auto classes know the models. The models are loaded, with faster kernels and the fast
decoder, when the Auto classes or another import need them.
"""

import importlib.abc
import sys
from pkgutil import extend_path

# In the repository, this folder holds no room. An editable install has links to the rooms in another folder of this name.
__path__ = extend_path(__path__, __name__)
__version__ = "0.1.0"
_MODEL_TYPE = "metaphrase"
_CONFIGURATIONS = "transformers.models.auto.configuration_auto"
_ROOMS = ("metaphrase.modeling", "metaphrase.ops", "metaphrase.decoding")


def install() -> None:
    """Register the models, and plug `ops` and `decoding` into them. A second call changes nothing."""
    from metaphrase import decoding, ops

    # From here on the table holds the class itself.
    sys.modules[_CONFIGURATIONS].CONFIG_MAPPING._mapping.pop(_MODEL_TYPE, None)
    ops.install()
    decoding.install()


def _announce() -> None:
    """Add the model type to transformers' table of configurations, which loads a class when it is looked up."""
    # `AutoConfig.register` needs the class itself, and so torch. Only the private tables take a name that is imported later.
    table = sys.modules[_CONFIGURATIONS].CONFIG_MAPPING
    if _MODEL_TYPE not in table:
        table._mapping[_MODEL_TYPE] = "MetaphraseConfig"
        table._modules[_MODEL_TYPE] = sys.modules[__name__]


def __getattr__(name: str):
    if name != "MetaphraseConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from metaphrase.modeling import MetaphraseConfig

    return MetaphraseConfig


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that acts after some imports: transformers' table of configurations, and the rooms that `install` connects."""

    def __init__(self) -> None:
        self._open_imports: set[str] = set()

    def find_spec(self, name, path=None, target=None):
        if name != _CONFIGURATIONS and name not in _ROOMS:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._execute(name, execute, module)
        return spec

    def _execute(self, name: str, execute, module) -> None:
        if name == _CONFIGURATIONS:
            execute(module)
            _announce()
            return
        self._open_imports.add(name)
        try:
            execute(module)
        finally:
            self._open_imports.discard(name)
        # Rooms import each other. The last one of them is followed by `install`.
        if not self._open_imports:
            install()


if _CONFIGURATIONS in sys.modules:
    _announce()
sys.meta_path.insert(0, _Finder())
