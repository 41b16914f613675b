"""The agents of the trainers' tests are played here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "trainers"))
