"""The only module that touches private or version-dependent torch names.

Each name has one test in ``tests/unit/test_compat.py``, so that a torch upgrade fails there first.
"""

from __future__ import annotations
