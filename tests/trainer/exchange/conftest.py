"""Lets the tests here import the simulated cluster that lies beside them."""

import sys
from pathlib import Path

# importlib mode adds no folder to the path, so modules beside the tests are found through this.
sys.path.append(str(Path(__file__).parent))

from small_frames import small_frames

__all__ = ["small_frames"]
