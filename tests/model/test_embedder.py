import torch

from nofuss.model.embedder import build_embedder


def test_an_embedder_maps_pictures_to_dim_numbers() -> None:
    embedder = build_embedder("convnet", dim=16)
    assert embedder(torch.rand(3, 1, 28, 28)).shape == (3, 16)
