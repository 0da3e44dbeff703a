"""Forms of dynamic assignment from bare triplets that do not reach static assignment."""

import torch
from torch import Tensor, nn

from nofuss.geometry import normalize
from nofuss.losses.proxy_nca import nca_of_logits
from nofuss.proxies.assignment import ProxyTriplets

QUEUE = 5
"""Points that Sinkhorn remembers, for each proxy."""
ENTROPY = 0.03
"""Of Sinkhorn; the best of 0.01, 0.03, 0.05, 0.1 on training classes."""
IDLE = 20
"""Steps after which an unused proxy is put elsewhere."""
SOFTEST = 10.0
"""How much softer responsibilities are at the first step than at the last."""


class Other(nn.Module):
    """A form of dynamic assignment from bare triplets that is no part of nofuss."""

    def __init__(self, proxies: Tensor, scale: float, steps: int) -> None:
        super().__init__()
        self.proxies, self.scale, self.steps = nn.Parameter(proxies.clone()), scale, steps
        self.idle = torch.zeros(len(proxies), dtype=torch.int64)
        self.step = 0

    def forward(self, x: Tensor, *, positives: Tensor, negatives: Tensor) -> Tensor:
        """Return Proxy-NCA of the batch's triplets."""
        if self.training:
            self.move(normalize(positives.detach()))
        x, y, z, p = (normalize(each) for each in (x, positives, negatives, self.proxies))
        if self.training:
            self.step += 1
            self.idle += 1
        losses: Tensor = self.losses(x, y.detach(), z.detach(), p)
        return losses.mean()

    def move(self, y: Tensor) -> None:
        """Do nothing: proxies move by their gradients."""

    def losses(self, x: Tensor, y: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """Return the loss of each triplet: p(y) is the closest proxy, Z all others."""
        chosen = self.choose(x.detach(), y, p.detach())
        self.idle[chosen] = 0
        return nca_of_logits(self.scale * (x @ p.T), ProxyTriplets(chosen))

    def choose(self, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        """Return p(y), Eq. 5."""
        return (y @ p.T).argmax(1)


class OfTheBatch(Other):
    """p(Z) are the proxies of all negatives of the batch, and of the positives of others."""

    def losses(self, x: Tensor, y: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """Return the loss of each triplet that has a negative proxy other than p(y)."""
        positive, negative = ((points @ p.detach().T).argmax(1) for points in (y, z))
        self.idle[torch.cat([positive, negative])] = 0
        among = torch.zeros(len(p), dtype=torch.bool)
        among[torch.cat([positive, negative])] = True
        if among.sum() < 2:
            return (x @ p.T).sum(1) * 0
        in_z = among.expand(len(x), -1).scatter(1, positive[:, None], False)
        return nca_of_logits(self.scale * (x @ p.T), ProxyTriplets(positive, in_z))


class Sinkhorn(Other):
    """x and y choose together, evenly over the batch and a queue: optimal transport."""

    def __init__(self, proxies: Tensor, scale: float, steps: int) -> None:
        super().__init__(proxies, scale, steps)
        self.queue = proxies[:0].detach()

    def choose(self, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        """Return the proxy that an even plan gives to most of (x + y) / 2."""
        points = torch.cat([normalize(x + y), self.queue])
        scores = points @ p.T / ENTROPY
        rows = torch.zeros(len(points))
        for _ in range(10):
            columns = -torch.logsumexp(scores + rows[:, None], 0)
            rows = -torch.logsumexp(scores + columns, 1)
        if self.training:
            self.queue = points[: QUEUE * len(p)]
        plan: Tensor = scores + columns
        return plan[: len(x)].argmax(1)


class Soft(Other):
    """y is responsible for all proxies, at first nearly evenly, at the end hardly but for one."""

    def losses(self, x: Tensor, y: Tensor, z: Tensor, p: Tensor) -> Tensor:
        """Return the cross-entropy of x against the responsibilities of y."""
        sharpness: float = self.scale * SOFTEST ** (min(1.0, self.step / self.steps) - 1)
        target = (sharpness * (y @ p.detach().T)).softmax(1)
        self.idle[target.argmax(1)] = 0
        return -(target * (self.scale * (x @ p.T)).log_softmax(1)).sum(1)


class Reseeded(Other):
    """Proxies that nothing chose for a while are put at points of the most chosen one."""

    @torch.no_grad()
    def move(self, y: Tensor) -> None:
        """Put unused proxies at a quarter of the points, those of crowded proxies first."""
        chosen = (y @ normalize(self.proxies).T).argmax(1)
        unused = (self.idle > IDLE).nonzero()[:, 0][: len(y) // 4]
        crowd = torch.bincount(chosen, minlength=len(self.proxies))[chosen].argsort(descending=True)
        self.proxies[unused] = y[crowd[: len(unused)]]
        self.idle[unused] = 0
