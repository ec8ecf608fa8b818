"""A voice as one file for Piper, Home Assistant and sherpa-onnx."""

from common.errors import require


def require_packages() -> None:
    """Raises `RunError` if a package is missing that writes ONNX."""
    for name in ("onnx", "onnxruntime"):
        require(name, "--export", "onnx onnxruntime")
