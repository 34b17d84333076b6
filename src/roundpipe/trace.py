"""Logging and the in-memory event log."""

from __future__ import annotations

import logging

logger = logging.getLogger("roundpipe")
