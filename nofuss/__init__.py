"""nofuss: learn a distance that works on classes never seen before.

"No Fuss Distance Metric Learning using Proxies" (Movshovitz-Attias et al., ICCV 2017), whole.
Names are imported when first used, so that `import nofuss` alone does not load torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nofuss.data.collection import compact_labels, from_dataset
    from nofuss.data.open import open_data
    from nofuss.data.triplets import linked_groups
    from nofuss.estimator import ProxyEmbedding
    from nofuss.evaluate import kmeans, map_at_r, nmi, recall_at_k
    from nofuss.losses import (
        NCA,
        LiftedStructure,
        NPairs,
        ProxyAnchor,
        ProxyNCA,
        ProxyNCAPlusPlus,
        ProxyTriplet,
        Ranking,
        SemiHardTriplet,
        SoftTriple,
        StructuredClustering,
        Triplet,
    )
    from nofuss.model.encoder import Encoder, load
    from nofuss.proxies import (
        Balanced,
        Dynamic,
        Fractional,
        Several,
        Static,
        count_proxy_triplets,
        count_triplets,
        proxy_bounds,
    )
    from nofuss.search import Index
    from nofuss.training.api import train

_HOMES = {
    "nofuss.data.collection": ("compact_labels", "from_dataset"),
    "nofuss.data.open": ("open_data",),
    "nofuss.data.triplets": ("linked_groups",),
    "nofuss.model.encoder": ("Encoder", "load"),
    "nofuss.estimator": ("ProxyEmbedding",),
    "nofuss.evaluate": ("kmeans", "map_at_r", "nmi", "recall_at_k"),
    "nofuss.losses": (
        "NCA",
        "LiftedStructure",
        "NPairs",
        "ProxyAnchor",
        "ProxyNCA",
        "ProxyNCAPlusPlus",
        "ProxyTriplet",
        "Ranking",
        "SemiHardTriplet",
        "SoftTriple",
        "StructuredClustering",
        "Triplet",
    ),
    "nofuss.proxies": (
        "Balanced",
        "Dynamic",
        "Fractional",
        "Several",
        "Static",
        "count_proxy_triplets",
        "count_triplets",
        "proxy_bounds",
    ),
    "nofuss.search": ("Index",),
    "nofuss.training.api": ("train",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "NCA",
    "Balanced",
    "Dynamic",
    "Encoder",
    "Fractional",
    "Index",
    "LiftedStructure",
    "NPairs",
    "ProxyAnchor",
    "ProxyEmbedding",
    "ProxyNCA",
    "ProxyNCAPlusPlus",
    "ProxyTriplet",
    "Ranking",
    "SemiHardTriplet",
    "Several",
    "SoftTriple",
    "Static",
    "StructuredClustering",
    "Triplet",
    "compact_labels",
    "count_proxy_triplets",
    "count_triplets",
    "from_dataset",
    "kmeans",
    "linked_groups",
    "load",
    "map_at_r",
    "nmi",
    "open_data",
    "proxy_bounds",
    "recall_at_k",
    "train",
]
__version__ = "0.1.0"
# A library is silent unless its user configures logging.
logging.getLogger("nofuss").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nofuss' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
