"""Export of Metaphrase models to CTranslate2."""

from packaging.version import Version

try:
    import ctranslate2
except ImportError as error:
    raise ImportError("CTranslate2 is not installed: pip install metaphrase[ctranslate2]") from error

# 4.8.0 silently computes a relative bias per layer wrongly.
if Version(ctranslate2.__version__) < Version("4.8.5"):
    raise ImportError(
        f"CTranslate2 must be at least 4.8.5, got {ctranslate2.__version__}: pip install metaphrase[ctranslate2]"
    )
