"""The losses: over instances, over proxies, and a dict of their names."""

from nofuss.losses.clustering import StructuredClustering
from nofuss.losses.instance_loss import InstanceLoss
from nofuss.losses.lifted import LiftedStructure
from nofuss.losses.nca import NCA
from nofuss.losses.npairs import NPairs
from nofuss.losses.proxy_anchor import ProxyAnchor
from nofuss.losses.proxy_loss import ProxyLoss
from nofuss.losses.proxy_nca import ProxyNCA, ProxyNCAPlusPlus
from nofuss.losses.proxy_triplet import ProxyTriplet
from nofuss.losses.ranking import Ranking
from nofuss.losses.semihard import SemiHardTriplet
from nofuss.losses.soft_triple import SoftTriple
from nofuss.losses.triplet import Triplet

PROXY_LOSSES: dict[str, type[ProxyLoss]] = {
    "proxy-nca": ProxyNCA,
    "proxy-triplet": ProxyTriplet,
    "proxy-nca++": ProxyNCAPlusPlus,
    "proxy-anchor": ProxyAnchor,
    "soft-triple": SoftTriple,
}
INSTANCE_LOSSES: dict[str, type[InstanceLoss]] = {
    "nca": NCA,
    "triplet": Triplet,
    "semi-hard": SemiHardTriplet,
    "lifted": LiftedStructure,
    "n-pairs": NPairs,
    "clustering": StructuredClustering,
}

__all__ = [
    "INSTANCE_LOSSES",
    "NCA",
    "PROXY_LOSSES",
    "LiftedStructure",
    "NPairs",
    "ProxyAnchor",
    "ProxyLoss",
    "ProxyNCA",
    "ProxyNCAPlusPlus",
    "ProxyTriplet",
    "Ranking",
    "SemiHardTriplet",
    "SoftTriple",
    "StructuredClustering",
    "Triplet",
]
