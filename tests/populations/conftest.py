"""The Hub of the trainers' tests serves those of populations too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainers"))
