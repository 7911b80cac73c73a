"""The still picture of a widget, for saved notebooks and exported pages, which have no kernel."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110


def with_still(bundle: Any, png: bytes) -> Any:
    """A widget's mime bundle, or pair of bundle and metadata, with a picture beside the widget."""
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    if data is not None:
        data["image/png"] = base64.b64encode(png).decode()
    return bundle


def png_of(figure: Figure) -> bytes:
    """A figure as PNG, closed afterwards."""
    import matplotlib.pyplot as plt

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    plt.close(figure)
    return drawn.getvalue()
