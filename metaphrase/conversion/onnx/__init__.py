"""Export of Metaphrase models to ONNX."""

from metaphrase.errors import naming_extra

with naming_extra("onnx", "ONNX"):
    import onnx  # noqa: F401
    import onnx_ir  # noqa: F401
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401 (torch's exporter needs it)
