"""A loss of nofuss in PyTorch Lightning: python examples/lightning_module.py

The criterion is a submodule, so that Lightning moves it to the device, and its proxies are a group
of the optimizer with a rate of its own. Under several devices each process must see the loss of the
whole batch: gather embeddings and labels first (`all_gather` with `sync_grads=True`), as below.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nofuss import ProxyNCA, recall_at_k


class Embedder(lightning.LightningModule):
    """A linear embedding of vectors, trained with Proxy-NCA."""

    def __init__(self, features: int, classes: int, *, dim: int = 16) -> None:
        super().__init__()
        self.network = nn.Linear(features, dim)
        self.criterion = ProxyNCA(classes, dim, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings (B, dim)."""
        found: Tensor = self.network(x)
        return found

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss over the whole batch, whatever the number of processes."""
        x, labels = self(batch[0]), batch[1]
        if self.trainer.world_size > 1:
            x = self.all_gather(x, sync_grads=True).flatten(0, 1)
            labels = self.all_gather(labels).flatten()
        loss: Tensor = self.criterion(x, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a higher rate for the proxies."""
        groups = [
            {"params": self.network.parameters(), "lr": 1e-3},
            {"params": self.criterion.parameters(), "lr": 1e-1},
        ]
        return torch.optim.Adam(groups)


def main(epochs: int = 5) -> tuple[float, float]:
    """Train on the digits 0 to 4; print and return Recall@1 on 5 to 9, before and after."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64)
    x = torch.cat([pixels, 2 * torch.rand_like(pixels)], dim=1)  # half of it is noise
    labels = torch.tensor(digits.target)
    seen = labels < 5
    model = Embedder(x.shape[1], 5)

    def score() -> float:
        return recall_at_k(model(x[~seen]).detach(), labels[~seen])[1]

    before = score()
    loader = DataLoader(TensorDataset(x[seen], labels[seen]), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    after = score()
    print(f"Recall@1 on unseen digits: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
