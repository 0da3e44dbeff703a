"""Data: from whatever the user has to batches of inputs and labels.

detect → folder | manifest | triplets | vectors | benchmarks | glyphs → Collection
Collection → scan (what can't be used) → split → pictures (decoded once)
sampling (which items) → loader (decode, transforms) → Batch(inputs, labels, indices)

Names are imported when first used, so that a process that only decodes pictures needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nofuss.data.cache import cache_directory
    from nofuss.data.collection import Collection, compact_labels, from_dataset
    from nofuss.data.decode import PictureError
    from nofuss.data.detect import open_data
    from nofuss.data.folder import find_pictures
    from nofuss.data.labelling import Labelling
    from nofuss.data.links import linked_groups
    from nofuss.data.loader import Batch, batches
    from nofuss.data.pictures import decode_ahead
    from nofuss.data.sampling import in_order, m_per_class, shuffled
    from nofuss.data.scan import ScanReport, scan_pictures
    from nofuss.data.split import Split, hold_out, split_classes, split_collection
    from nofuss.data.transforms import test_views, train_views

_HOMES = {
    "cache": ("cache_directory",),
    "collection": (
        "Collection",
        "compact_labels",
        "from_dataset",
    ),
    "decode": ("PictureError",),
    "detect": ("open_data",),
    "folder": ("find_pictures",),
    "links": ("linked_groups",),
    "labelling": ("Labelling",),
    "loader": (
        "Batch",
        "batches",
    ),
    "pictures": ("decode_ahead",),
    "sampling": (
        "in_order",
        "m_per_class",
        "shuffled",
    ),
    "scan": (
        "ScanReport",
        "scan_pictures",
    ),
    "split": (
        "Split",
        "hold_out",
        "split_classes",
        "split_collection",
    ),
    "transforms": (
        "test_views",
        "train_views",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "Collection",
    "Labelling",
    "PictureError",
    "ScanReport",
    "Split",
    "batches",
    "cache_directory",
    "compact_labels",
    "decode_ahead",
    "find_pictures",
    "from_dataset",
    "hold_out",
    "in_order",
    "linked_groups",
    "m_per_class",
    "open_data",
    "scan_pictures",
    "shuffled",
    "split_classes",
    "split_collection",
    "test_views",
    "train_views",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nofuss.data' has no attribute {name!r}")
    return getattr(import_module(f"nofuss.data.{_HOME_OF[name]}"), name)
