"""Export of Metaphrase models to ONNX."""
