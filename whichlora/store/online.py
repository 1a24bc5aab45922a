"""Whether the Hugging Face hub can be asked from here."""

from __future__ import annotations

from functools import cache

_TIMEOUT_S = 5.0  # a hub that takes longer counts as unreachable


@cache
def why_offline() -> str | None:
    """Why the hub can't be asked, None if it can; asked once per process.

    The hub's own downloads retry for half a minute where there is no network, and again for
    every file.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off"
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception as error:  # requests and httpx share no narrower error
        return f"the hub can't be reached ({type(error).__name__})"
    return None
