"""The package `huggingface_hub`: imported when it is needed, its errors in one line.

The token comes from HF_TOKEN or `hf auth login` and goes into a header of its requests; no message
of ours contains the text of a request.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from nofuss.errors import HubError, UsageError


def hub_package() -> ModuleType:
    """Return the package; UsageError if it is not installed."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            "models on the Hub need another package: pip install 'nofuss[hub]'"
        ) from None
    module: ModuleType = huggingface_hub
    return module


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise HubError, with what to do, for what `huggingface_hub` raises."""
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        reason = "its owner gives access on request; ask on its page, then: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = f"{host} has no such model, or it is private; check the name, or: hf auth login"
    except errors.RevisionNotFoundError:
        reason = "it has no such revision; check what is after the @"
    except errors.LocalEntryNotFoundError:
        reason = f"can't reach {host}, and it is not in the cache; connect and try again"
    except errors.EntryNotFoundError:
        reason = "it has no files of nofuss; give a model that `nofuss push` wrote"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            reason = f"{host} refuses ({status}); use a token that may do this: hf auth login"
        else:
            reason = f"{host} answers with status {status}; try again later"
    except OSError as error:
        if error.filename or isinstance(error, errors.CacheNotFound):
            raise  # the disk, not the network
        reason = f"can't reach {host} ({type(error).__name__}); connect and try again"
    except Exception as error:
        if not _is_of_network(error):
            raise
        reason = f"can't reach {host} ({type(error).__name__}); connect and try again"
    else:
        return
    raise HubError(f"{what}: {reason}")


def _is_of_network(error: Exception) -> bool:
    """Return whether an error is of the HTTP client, which has changed its name before."""
    return type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "requests")
