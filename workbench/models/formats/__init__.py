"""Number formats in which published weights are stored, and the operations of a model that have them."""

from workbench.models.formats.int4 import REMEDY, Int4Layout, int4_layout, int4_layout_of, is_int4
from workbench.models.formats.quantisation import Quantisation, quantisation_of, stored_formats
from workbench.models.formats.stored import GGUF_BLOCKS, STORED_BYTES, Formats, bytes_per_weight, with_formats

__all__ = [
    "GGUF_BLOCKS",
    "REMEDY",
    "STORED_BYTES",
    "Formats",
    "Int4Layout",
    "Quantisation",
    "bytes_per_weight",
    "int4_layout",
    "int4_layout_of",
    "is_int4",
    "quantisation_of",
    "stored_formats",
    "with_formats",
]
