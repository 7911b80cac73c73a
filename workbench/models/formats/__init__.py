"""Number formats in which published weights are stored, and the operations of a model that have them."""

from workbench.models.formats.quantisation import Quantisation, quantisation_of, stored_formats
from workbench.models.formats.stored import GGUF_BLOCKS, STORED_BYTES, Formats, bytes_per_weight, with_formats

__all__ = [
    "GGUF_BLOCKS",
    "STORED_BYTES",
    "Formats",
    "Quantisation",
    "bytes_per_weight",
    "quantisation_of",
    "stored_formats",
    "with_formats",
]
