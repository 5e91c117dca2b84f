"""Export of Metaphrase models to ONNX."""

try:
    import onnx  # noqa: F401
    import onnx_ir  # noqa: F401
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401 (torch's exporter needs it)
except ImportError as error:
    raise ImportError("ONNX is not installed: pip install metaphrase[onnx]") from error
