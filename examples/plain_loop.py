"""Proxy-NCA in a plain loop, no trainer: python examples/plain_loop.py

Handwritten digits beside as many columns of noise. Trained on 0 to 4, the model learns what to
ignore, which carries over to 5 to 9. (Without the noise a random projection already finds 95%
of them, and five classes teach nothing new.) An illustration, no benchmark: its settings were
picked on these same digits.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from nofuss import ProxyNCA, recall_at_k

torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64)
x = torch.cat([pixels, 2 * torch.rand_like(pixels)], dim=1)
labels = torch.tensor(digits.target)
train = labels < 5

model = nn.Linear(128, 32)
criterion = ProxyNCA(num_classes=5, dim=32)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer.add_param_group({"params": criterion.parameters(), "lr": 0.1})  # proxies move faster


def score() -> float:
    """Recall@1 on the digits never trained on."""
    return recall_at_k(model(x[~train]).detach(), labels[~train])[1]


before = score()
for _ in range(10):
    order = train.nonzero().squeeze(1)[torch.randperm(int(train.sum()))]
    for rows in torch.tensor_split(order, len(order) // 32):
        optimizer.zero_grad()
        criterion(model(x[rows]), labels[rows]).backward()
        optimizer.step()
print(f"Recall@1 on unseen digits: {before:.3f} before, {score():.3f} after")
