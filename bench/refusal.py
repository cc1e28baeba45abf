"""Refusal: what a peer answers for a row that it cannot run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Refusal"]


@dataclass(frozen=True)
class Refusal:
    """Why a peer has no callable for a row."""

    reason: str
