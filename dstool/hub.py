"""Pushing a model folder to the Hugging Face hub, and what can be found wrong with that beforehand."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dstool import files, preflight
from dstool.errors import ConfigError, EnvironmentUnfit

FLAG = "--push-to-hub"


def is_name(text: str) -> bool:
    """Whether the hub could have a repository called `text`."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def check(repo: str, *, private: bool = False) -> None:
    """Find out whether a model could be pushed to `repo`, before one is made.

    Raises:
        ConfigError: the hub has no such names; or it is to be `private`, and is there for all to see.
        EnvironmentUnfit: the hub does not answer, there is no token, or the hub does not take it.
    """
    if not is_name(repo):
        raise ConfigError(
            f"{FLAG} {repo}: names there are at most 96 letters, digits, and - _ . between them",
            hint=f"{FLAG} NAME or {FLAG} OWNER/NAME",
        )
    if reason := preflight.silent_hub():
        mend = "unset HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" in reason else "mend the network"
        raise EnvironmentUnfit(
            f"{FLAG}: the Hugging Face hub cannot be reached ({reason})", hint=f"{mend}, or leave {FLAG} out"
        )
    if get_token() is None:
        raise EnvironmentUnfit(f"{FLAG}: there is no token for the Hugging Face hub", hint="hf auth login")
    try:
        owner = HfApi().whoami()["name"]
    except Exception as error:  # of the hub's client, of the one for HTTP beneath it, or of the system
        raise EnvironmentUnfit(
            f"{FLAG}: the Hugging Face hub does not take the token ({_line(error)})",
            hint="hf auth login --force",
        ) from error
    if private and _is_public(repo if "/" in repo else f"{owner}/{repo}"):
        raise ConfigError(
            f"{FLAG} {repo}: that repository is there and public, and --private is for a new one",
            hint="name a new one, or leave --private out",
        )


def _is_public(repo: str) -> bool:
    """Whether `repo` is on the hub, for all to see."""
    try:
        return not HfApi().model_info(repo).private
    except RepositoryNotFoundError:
        return False
    except Exception as error:  # as in `check`
        raise EnvironmentUnfit(
            f"{FLAG}: the Hugging Face hub does not say whether {repo} is private ({_line(error)})",
            hint="give the command again later, or leave --private out",
        ) from error


def push(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload `folder` as the model `repo`, which is made where there is none; its address.

    A new one is `private`, or else what the account says.

    Raises:
        EnvironmentUnfit: it could not be uploaded. The folder stays as it is.
    """
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Upload a model by dstool")
    except Exception as error:  # as in `check`
        raise EnvironmentUnfit(
            f"{folder} is written, and could not be pushed to {repo}: {_line(error)}",
            hint=f"hf upload {repo} {files.typed(folder)}{' --private' if private else ''}",
        ) from error
    return str(made)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
