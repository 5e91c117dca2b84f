"""Leaves out the tests of the ONNX exports where its packages are not installed."""

import importlib.util

IS_INSTALLED = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]
