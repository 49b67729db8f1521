"""Models outside Python: an ONNX file for any ONNX runtime, and a static page that runs it in a browser.

>>> export_onnx("box", folder / "onnx")
>>> export_page("box", folder / "page")
"""

try:
    import onnx as _onnx  # noqa: F401
except ImportError as error:
    raise ImportError("exporting to ONNX needs onnx: pip install 'gss-lm[onnx]'") from error

from gss.export.model import export_onnx, export_page

__all__ = ["export_onnx", "export_page"]
