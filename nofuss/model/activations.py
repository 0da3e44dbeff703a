"""Activations in front of the stages that are trained, kept in the cache (`cache.Records`).

The key covers the weights of the fixed stages, the preprocessing, the seed and the pictures. A
record is written when its view is first needed, and read from then on; after a kill, the records
that are whole are used. Views without space are computed every time.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nofuss.cache import Records, room
from nofuss.data.sampling import Indices

Compute = Callable[[int, Indices], Tensor]
"""View and rows → activations (B, …) of these pictures."""


class Activations:
    """Activations of `views` views of `count` pictures, read from the cache or computed.

    shape: of one picture's activations. name: in the cache, None to keep nothing. say: called with
    one line if not all views can be kept.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        shape: tuple[int, ...],
        count: int,
        views: int,
        name: str | None,
        say: Callable[[str], object],
    ) -> None:
        self.compute, self.count, self.views, self._say = compute, count, views, say
        self._records: Records | None = None
        self._writes = True
        if name is not None:
            self._open(name, shape)

    def take(self, view: int, rows: Indices) -> Tensor:
        """Return activations (B, …) of some pictures in a view, in single precision.

        They are rounded to half precision whether or not they are kept, so that the result does not
        depend on the room in the cache.
        """
        places, values, records = view * self.count + rows, None, self._records
        is_kept = records is not None and len(places) and places.max() < records.count
        if records is not None and is_kept:
            values = records.read(places)
        if values is None:
            values = self.compute(view, rows).numpy().astype(np.float16)
            if records is not None and is_kept and self._writes:
                try:
                    records.write(places, values)
                except OSError as error:
                    self._stop(error)  # what is kept is still read
        return torch.from_numpy(values.astype(np.float32))

    def _open(self, name: str, shape: tuple[int, ...]) -> None:
        """Open or make the file with room for as many views as the cache allows."""
        one_view = self.count * Records.kind_of(shape, np.float16).itemsize
        free = room()
        views = min(self.views, free // one_view)
        try:
            if views:
                self._records = Records(name, shape, np.float16, views * self.count)
        except OSError as error:
            self._stop(error)
            return
        if views < self.views:
            needed, left = self.views * one_view / 2**30, free / 2**30
            self._say(
                f"activations take {needed:.1f} GB and the cache has room for {left:.1f}, so "
                f"{self.views - views} of {self.views} views are computed again in every epoch; "
                "NOFUSS_CACHE names another folder"
            )

    def _stop(self, error: OSError) -> None:
        """Keep nothing more."""
        self._writes = False
        self._say(
            f"activations can't be kept ({error.strerror or error}), so the fixed stages run again "
            "in every epoch; free the disk, or set NOFUSS_CACHE to another folder"
        )
