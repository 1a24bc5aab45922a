"""The answer of a run as one HTML file that opens anywhere, made from `answer.json` alone."""

from whichlora.html.images import require_images, write_images
from whichlora.html.page import write_report

__all__ = ["require_images", "write_images", "write_report"]
