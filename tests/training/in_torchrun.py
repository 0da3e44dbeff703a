"""What two processes of a real torchrun check: one step in float32, a training in double."""

import torch

from nofuss.distributed import processes
from tests.training.equal_losses import check_losses
from tests.training.equal_training import check_training

if __name__ == "__main__":
    with processes.joined():
        assert processes.world() == 2
        check_losses(torch.float32, rel=1e-5)
        check_training()
