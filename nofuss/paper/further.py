"""Rows of the tables beyond the paper's six methods: Proxy-NCA as the field uses it.

Its scale is tuned, and the positive is put into the denominator (the softmax form, Proxy-NCA++),
which is what most public code calls Proxy-NCA.
"""

from nofuss.paper.published import METHODS

FURTHER = {
    "proxy-nca-scaled": "Proxy-NCA at its best scale",
    "proxy-nca++": "Proxy-NCA++ at its best scale",
}
"""Method → its name in tables. The scale is chosen at the method's rate, on the same folds."""
NAMES = METHODS | FURTHER
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Candidates for the scale, times what Proxy-NCA has without a choice."""
USUAL_SCALE = 18.0
"""Of both losses where the settings name none: norms of 3, a temperature of 1/9."""


def loss_of(method: str) -> str:
    """Return the loss that a method trains with."""
    return "proxy-nca" if method == "proxy-nca-scaled" else method
