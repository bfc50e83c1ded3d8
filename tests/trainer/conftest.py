"""Lets the tests here, and the scripts they start, import their shared sample runs."""

import sys
from pathlib import Path

# importlib mode adds no folder to the path, so modules beside the tests are found through this.
sys.path.append(str(Path(__file__).parent))
