"""benchmarks/ is no package: its scripts import what lies beside them, and so do its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
