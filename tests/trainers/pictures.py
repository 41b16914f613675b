"""An environment that shows images, in a module that is quick to import: processes of environments import it."""

from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
from chatter import Chatter


class Pictures(Chatter):
    """Chatter that shows an image of the seed and the turn with each text."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        text, info = super().reset(seed, options)
        self.seed = seed or 0
        return self._shown(text), info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        text, *others = super().step(action)
        return self._shown(text), *others

    def _shown(self, text: str) -> list[dict[str, Any]]:
        size = (24, 16 + 8 * (self.turn % 2))
        pixels = np.random.default_rng([self.seed, self.turn]).integers(0, 256, (*size, 3), dtype=np.uint8)
        image = {"type": "image", "image": PIL.Image.fromarray(pixels)}
        return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
