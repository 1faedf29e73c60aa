"""`deepspeed.utils.logging`: a logger, and messages of some ranks only."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fzero.comms.process_group import job

logger = logging.getLogger("fzero")
log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class LoggerFactory:
    """Makes loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        """The logger of a name, at a level."""
        if name is None:
            raise ValueError("LoggerFactory.create_logger: name must be given, got None; pass one")
        found = logging.getLogger(name)
        found.setLevel(level)
        return found


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """The message with the rank, on the given ranks; else None. None and -1 are all
    ranks.
    """
    rank = job().rank
    return f"[Rank {rank}] {message}" if ranks is None or rank in ranks or -1 in ranks else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks; None and -1 are all ranks."""
    if (text := get_dist_msg(message, ranks)) is not None:
        logger.log(level, text)


@cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(
    message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO
) -> None:
    """Logs on the given ranks, a message only once."""
    _once(message, None if ranks is None else tuple(ranks), level)


@cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Logs a warning, the same only once."""
    logger.warning(*args, **kwargs)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Prints on the given ranks; None and -1 are all ranks."""
    if (text := get_dist_msg(message, ranks)) is not None:
        print(text, flush=True)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | Path | None = None
) -> None:
    """Writes a dict as JSON to a file, on the given ranks."""
    if get_dist_msg("", ranks) is not None and path is not None:
        Path(path).write_text(json.dumps({**message, "rank": job().rank}), "utf-8")


def print_configuration(args: Any, name: str) -> None:
    """Logs the attributes of an object, sorted."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), value)


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(
            f"log_level: must be one of {', '.join(log_levels)}, got {log_level_str!r}; pass one "
            f"of these"
        )
    return level


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Sets the level of a logger, by default fzero's."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger's level is at most this one."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
