"""`nofuss serve`: a page to search in."""

from typing import Annotated, Literal

from cyclopts import Parameter

from nofuss.commands import IndexUrl, RunPath


def main(
    run: RunPath,
    /,
    *,
    index: IndexUrl = None,
    port: Annotated[int, Parameter(metavar="N")] = 8000,
    host: Annotated[str, Parameter(metavar="ADDRESS")] = "127.0.0.1",
    origin: Annotated[str | None, Parameter(metavar="URL")] = None,
    no_token: bool = False,
    rerank: Literal["auto", "none"] = "auto",
) -> None:
    """Serve a page to search in a run's index.

    The index holds the pictures of the training, and those that `nofuss index RUN DIR` added.

    Args:
        run: A run directory of `nofuss train`.
        index: The database that `nofuss index --to URL` wrote to.
        port: The port to listen on; 0 takes any free one.
        host: The address to listen on; the default can be reached from this machine only.
        origin: The public address of a reverse proxy on this machine, such as
            https://photos.example; see docs/photos.md.
        no_token: Do not require the token in the address: every user of this machine can search.
        rerank: none ranks by distance alone; auto re-ranks if that helped on held-out classes when
            the run was trained.
    """
    from nofuss.search.page.server import serve  # here, so that --help does not load torch

    serve(
        run,
        host=host,
        port=port,
        token=not no_token,
        origin=origin,
        index=index,
        rerank=rerank == "auto",
    )
