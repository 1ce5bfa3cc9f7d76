"""Rank-aware logging on stderr.

Below WARNING only rank 0 speaks; from WARNING up every rank does, with its number. The rank comes
from the environment, since torch may not have been started.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings


def rank() -> int:
    """This process's rank over all machines; 0 when nothing launched it."""
    return int(os.environ.get("RANK", "0"))


def debug() -> bool:
    """Whether `DSTOOL_DEBUG` asks for tracebacks and for everything the libraries say."""
    return os.environ.get("DSTOOL_DEBUG", "") not in {"", "0"}


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return text if rank() == 0 else f"[rank {rank()}] {text}"


def _speaks(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or rank() == 0


def set_up() -> None:
    """Send dstool's own log to stderr, and let the libraries underneath say warnings only."""
    logger = logging.getLogger("dstool")
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter())
    handler.addFilter(_speaks)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug() else logging.INFO)
    if not debug():
        warnings.filterwarnings("ignore")
        # On every machine without a GPU, it says that a CUDA build of torch finds none.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")


def quiet_deepspeed() -> None:
    """Lower DeepSpeed's own logger, which says a screenful at INFO. Call it after the import."""
    if not debug():
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
