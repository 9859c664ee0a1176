"""The steps and exercises are scripts: their folders go on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
for _place in (TUTORIALS, TUTORIALS / "exercises"):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))
