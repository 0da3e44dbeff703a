"""`nofuss backbones`: the networks that `nofuss train --backbone` takes by name."""

from nofuss.commands import console
from nofuss.errors import UsageError

HEADER = ["network", "side", "dim", "MB", "here", "photos/s", "licence"]


def main() -> None:
    """List the networks that `nofuss train --backbone` takes, and the licences of their weights.

    side: of the pictures in pixels; NAME@SIDE takes another. dim: length of the features. MB: to
    download. here: whether the weights are on this machine. photos/s: as last measured here.
    """
    import torch  # here, so that --help does not load it

    from nofuss.model.backbones import PRETRAINED_NETWORKS, build_backbone, is_installed, licence
    from nofuss.model.features import speed_of

    rows, missing, reason = [], list[str](), ""
    for name in PRETRAINED_NETWORKS:
        try:
            with torch.device("meta"):  # nothing is computed
                backbone = build_backbone(name, weights=None)
        except UsageError as error:
            missing.append(name)
            reason = str(error)
            continue
        assert backbone.preprocessing is not None
        size = sum(p.numel() * p.element_size() for p in backbone.parameters())
        speed = speed_of(name)
        rows.append(
            [
                name,
                str(backbone.preprocessing.size),
                str(backbone.features),
                f"{size / 1e6:.0f}",
                "yes" if is_installed(name) else "no",
                "–" if speed is None else f"{speed:.0f}",
                licence(name) or "unknown",
            ]
        )
    console.table("Networks for --backbone", HEADER, rows)
    if missing:
        console.say(f"Without timm there are no {', '.join(missing)}: {reason}")
    console.say("Also timm:NAME for any network of timm; several as NAME,NAME; auto for all here.")
