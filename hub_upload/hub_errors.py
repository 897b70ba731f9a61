"""What went wrong between this machine and the Hub, in one paragraph that shows no secret."""

import json
import re
import traceback

from huggingface_hub.errors import OfflineModeIsEnabled


_PASSING = {408, 429, 500, 502, 503, 504}
_KEPT = "Nothing is lost: what has arrived stays there, and the same command goes on from it."
# hf_xet, which uploads by another protocol than LFS, gives the status in words alone
_XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")
_QUOTA = re.compile(r"quota|storage (?:limit|is full|exceed)|exceed\w* .{0,40}storage|insufficient storage", re.I)


class HubFailure(Exception):
    """One failure of the Hub or of the connection, free of secrets.

    `status` is the HTTP status, None where there was no answer; `said` is what the server or the connection said.
    """

    def __init__(self, status: int | None, said: str, *, offline: bool = False, retry_after: float | None = None):
        super().__init__(f"{status or 'no answer'}: {said}")
        self.status, self.said, self.offline, self.retry_after = status, said, offline, retry_after

    @classmethod
    def of(cls, error: Exception, token: str | None) -> "HubFailure | None":
        """The failure behind an exception of huggingface_hub, or None for one that is not the Hub's."""
        chain = chain_of(error)
        said = without_secrets(" ".join(_said(chain).split()), token)[:500]
        if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
            return cls(None, said, offline=True)
        for link in chain:
            response = getattr(link, "response", None)
            status = getattr(response, "status_code", None)
            if status is not None:
                return cls(status, said, retry_after=_retry_after(response.headers))
        if found := _XET_STATUS.search(said):
            return cls(int(found[1]), said)
        if any(isinstance(link, json.JSONDecodeError) for link in chain):
            return cls(502, "the answer was not JSON")
        if any(_is_of_connection(link) or _is_of_xet(link) for link in chain):
            return cls(None, said)
        if "LFS batch API returned errors" in said or "Invalid metadata in README.md" in said:
            return cls(400, said)
        return None

    @property
    def may_pass(self) -> bool:
        """Whether trying again can help."""
        return not self.offline and (self.status is None or self.status in _PASSING)

    @property
    def unreachable(self) -> bool:
        """Whether the Hub gave no answer at all."""
        return self.status is None

    @property
    def short(self) -> str:
        """For a line in a log."""
        return f"The Hub answered {self.status}" if self.status else f"The connection to the Hub broke ({self.said})"


def explained_failure(failure: HubFailure, repo_id: str, endpoint: str) -> str:
    """One paragraph: what the Hub refused, what became of the files, and what to do."""
    status, said = failure.status, failure.said
    if failure.offline:
        return f"HF_HUB_OFFLINE is set, so nothing can be sent to {repo_id}. Unset it, and push again."
    if status in (402, 413, 507) or _QUOTA.search(said):
        return (
            f"The Hub has no room for this in the account of {repo_id} (status {status}: {said}). {_KEPT} Make room "
            f"under {endpoint}/settings/billing: delete repositories or old revisions, or take a larger plan."
        )
    if status == 401:
        return (
            f"The Hub does not accept the access token for {repo_id} (status 401: {said}). {_KEPT} Make a token with "
            f"the right to write at {endpoint}/settings/tokens and log in with `hf auth login`, or set HF_TOKEN."
        )
    if status == 403:
        return (
            f"The access token has no right to write to {repo_id} (status 403: {said}). {_KEPT} Take a token with that "
            f"right from {endpoint}/settings/tokens, ask an owner of the organization, or push under your own name."
        )
    if status == 404:
        return (
            f"The Hub has no repository or owner {repo_id}, or does not show it to this token (status 404: {said}). "
            f"{_KEPT} Check both names, and that the repository was not renamed or deleted meanwhile."
        )
    if status in (409, 412):
        return (
            f"{repo_id} was changed by someone else during this push (status {status}: {said}). Their commit was not "
            f"overwritten. {_KEPT} Look at {endpoint}/{repo_id}/commits/main first."
        )
    if status == 429:
        wait = f"{failure.retry_after:.0f} seconds" if failure.retry_after is not None else "some minutes"
        return f"The Hub limits the rate of requests (status 429: {said}). {_KEPT} Run it again in {wait}."
    if status == 400 and "metadata" in said.lower():
        return (
            f"The Hub rejects the card's metadata of {repo_id} ({said}). {_KEPT} Correct the block between the lines of "
            f"--- in README.md and push again."
        )
    if status is not None and status >= 500:
        return (
            f"The Hub has trouble of its own (status {status}: {said}), also after waiting. {_KEPT} See "
            f"https://status.huggingface.co and run it again later."
        )
    if status is not None:
        return (
            f"The Hub refuses the push to {repo_id} (status {status}: {said}). {_KEPT} If the reason is not clear, try "
            f"a later version of huggingface_hub."
        )
    return f"The connection to {endpoint} broke or could not be made ({said}). {_KEPT} Check the network and run it again."


def without_secrets(text: str, token: str | None) -> str:
    """The text without the token, others of its kind, and the signed part of addresses."""
    if token:
        text = text.replace(token, "<token>")
    text = re.sub(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}", "<token>", text)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1?...", text)


def chain_of(error: BaseException) -> list[BaseException]:
    """The error and what caused it, nearest first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _said(chain: list[BaseException]) -> str:
    """The server's own words where there are any, else the error's."""
    for link in chain:
        if said := getattr(link, "server_message", None):
            return str(said)
    for link in chain:
        if getattr(link, "response", None) is not None or _is_of_connection(link):
            return str(link)
    return str(chain[0])


def _is_of_connection(error: BaseException) -> bool:
    """An error of a socket or of the HTTP client, which is requests, httpx or httpx2 by huggingface_hub's version."""
    home = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or home in ("requests", "urllib3", "httpx", "httpx2")


def _is_of_xet(error: BaseException) -> bool:
    """Whether hf_xet raised it: most of its errors are Python's own RuntimeError, so where it rose is looked at."""
    if type(error).__module__.partition(".")[0] == "hf_xet":
        return True
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and "_upload_xet_files" in functions


def _retry_after(headers) -> float | None:
    """Seconds to wait, by `Retry-After` or by the rate limit's reset (draft-ietf-httpapi-ratelimit-headers)."""
    given = {key.lower(): value for key, value in dict(headers or {}).items()}
    if given.get("retry-after", "").isdigit():
        return float(given["retry-after"])
    limit = re.search(r"r=0;\s*t=(\d+)", given.get("ratelimit", ""))
    return float(limit[1]) if limit else None
