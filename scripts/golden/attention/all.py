#!/usr/bin/env python3
"""Runs every golden script of the attention methods, from the repository's root (see common.py)."""

import runpy
from pathlib import Path

for script in sorted(Path(__file__).parent.glob("*.py")):
    if script.stem not in ["all", "common"]:
        runpy.run_path(str(script), run_name="__main__")
