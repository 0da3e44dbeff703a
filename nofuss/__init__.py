"""nofuss: learn a distance that works on classes never seen before.

"No Fuss Distance Metric Learning using Proxies" (Movshovitz-Attias et al., ICCV 2017), whole.
Names are imported when first used, so that `import nofuss` alone does not load torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nofuss.data.collection import compact_labels as compact_labels
    from nofuss.data.collection import from_dataset as from_dataset
    from nofuss.data.open import open_data as open_data
    from nofuss.data.triplets import linked_groups as linked_groups
    from nofuss.estimator import ProxyEmbedding as ProxyEmbedding
    from nofuss.evaluate import kmeans as kmeans
    from nofuss.evaluate import map_at_r as map_at_r
    from nofuss.evaluate import nmi as nmi
    from nofuss.evaluate import recall_at_k as recall_at_k
    from nofuss.losses import NCA as NCA
    from nofuss.losses import LiftedStructure as LiftedStructure
    from nofuss.losses import NPairs as NPairs
    from nofuss.losses import ProxyAnchor as ProxyAnchor
    from nofuss.losses import ProxyNCA as ProxyNCA
    from nofuss.losses import ProxyNCAPlusPlus as ProxyNCAPlusPlus
    from nofuss.losses import ProxyTriplet as ProxyTriplet
    from nofuss.losses import Ranking as Ranking
    from nofuss.losses import SemiHardTriplet as SemiHardTriplet
    from nofuss.losses import SoftTriple as SoftTriple
    from nofuss.losses import StructuredClustering as StructuredClustering
    from nofuss.losses import Triplet as Triplet
    from nofuss.model.encoder import Encoder as Encoder
    from nofuss.model.encoder import load as load
    from nofuss.proxies import Balanced as Balanced
    from nofuss.proxies import Dynamic as Dynamic
    from nofuss.proxies import Fractional as Fractional
    from nofuss.proxies import Several as Several
    from nofuss.proxies import Static as Static
    from nofuss.proxies import count_proxy_triplets as count_proxy_triplets
    from nofuss.proxies import count_triplets as count_triplets
    from nofuss.proxies import proxy_bounds as proxy_bounds
    from nofuss.search import Index as Index
    from nofuss.training.api import train as train

_HOMES = {
    "nofuss.data.collection": "compact_labels from_dataset",
    "nofuss.data.open": "open_data",
    "nofuss.data.triplets": "linked_groups",
    "nofuss.model.encoder": "Encoder load",
    "nofuss.estimator": "ProxyEmbedding",
    "nofuss.evaluate": "kmeans map_at_r nmi recall_at_k",
    "nofuss.losses": "NCA LiftedStructure NPairs ProxyAnchor ProxyNCA ProxyNCAPlusPlus "
    "ProxyTriplet Ranking SemiHardTriplet SoftTriple StructuredClustering Triplet",
    "nofuss.proxies": "Balanced Dynamic Fractional Several Static "
    "count_proxy_triplets count_triplets proxy_bounds",
    "nofuss.search": "Index",
    "nofuss.training.api": "train",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)
__version__ = "0.1.0"
# A library is silent unless its user configures logging.
logging.getLogger("nofuss").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nofuss' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
