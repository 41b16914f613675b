"""Makes tiny models that read images, with random weights and processors, for ``make architectures`` and the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

from agile_trainers.embedded import CHAT_TEMPLATE, make_tokenizer


def image_template(mark: str) -> str:
    """Return the chat template of a model that reads images, in which messages may be lists of parts.

    Args:
        mark: What is written for an image.
    """
    plain = "{{ message['content'] + '<|im_end|>\n' }}"
    parts = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ '{mark}' }}}}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}"
        "{% endif %}{{ '<|im_end|>\n' }}"
    )
    assert plain in CHAT_TEMPLATE
    return CHAT_TEMPLATE.replace(plain, parts)


_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_IDEFICS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def _text(width: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "head_dim": width // 4, **more,
    }  # fmt: skip


def _tokenizer(mark: str, *tokens: str, **names: str) -> PreTrainedTokenizerFast:
    """Make the embedded model's tokenizer with further special tokens, and with names for some of them."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens, *names.values()]})
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        chat_template=image_template(mark),
        clean_up_tokenization_spaces=False,
        extra_special_tokens=names,
    )


def _qwen(name: str, width: int) -> tuple[dict[str, Any], ProcessorMixin]:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = _tokenizer(_QWEN_MARK, *_QWEN_IDS.values())
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    )
    kind, videos = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    }[name]
    processor = kind(images, tokenizer, videos(), chat_template=tokenizer.chat_template)
    common = {"depth": 2, "num_heads": 2, "patch_size": 4}
    vision = {
        "qwen2_vl": {**common, "embed_dim": 16, "hidden_size": width, "mlp_ratio": 2},
        "qwen2_5_vl": {
            **common, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": width, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            **common, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": width, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    }[name]  # fmt: skip
    ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in _QWEN_IDS.items()}
    axes = {"rope_type": "default", "mrope_section": [width // 16, width // 32, width // 32], "rope_theta": 1e4}
    axes |= {"mrope_interleaved": True} if name == "qwen3_vl" else {}  # as its checkpoints say; vLLM reads it
    return {**ids, "text_config": _text(width, rope_parameters=axes), "vision_config": vision}, processor


def _gemma3(name: str, width: int) -> tuple[dict[str, Any], ProcessorMixin]:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer("<start_of_image>", **special)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    return {
        "text_config": _text(width, layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        "vision_config": {**_SIGLIP, "image_size": 16},
        "mm_tokens_per_image": 4,
        "image_token_id": tokenizer.image_token_id,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
    }, processor


def _idefics(name: str, width: int) -> tuple[dict[str, Any], ProcessorMixin]:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    named = dict(zip(("fake_image_token", "image_token", "end_of_utterance_token", "global_image_token"), _IDEFICS))
    tokenizer = _tokenizer("<image>", *_TILES, **named)
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    template = tokenizer.chat_template
    if name == "smolvlm":
        from transformers import SmolVLMProcessor
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
        from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

        videos = SmolVLMVideoProcessor()
        images = SmolVLMImageProcessorPil(**size)
        processor = SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=template)
    else:
        processor = Idefics3Processor(
            Idefics3ImageProcessorPil(**size), tokenizer, image_seq_len=4, chat_template=template
        )
    return {
        "text_config": _text(width, model_type="llama"),
        "vision_config": {**_SIGLIP, "image_size": 16},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
    }, processor


def _llava(name: str, width: int) -> tuple[dict[str, Any], ProcessorMixin]:
    tokenizer = _tokenizer("<image>", "<image>", "<video>")
    ids = {
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "video_token_index": tokenizer.convert_tokens_to_ids("<video>"),
    }
    config: dict[str, Any] = {
        "text_config": _text(width, model_type="qwen2"),
        "vision_config": {**_SIGLIP, "image_size": 16},
    }
    if name == "llava":
        from transformers import LlavaProcessor
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        processor = LlavaProcessor(
            images, tokenizer, patch_size=4, vision_feature_select_strategy="default", chat_template=tokenizer.chat_template,
            num_additional_image_tokens=1,
        )  # fmt: skip
        vision = {**config["vision_config"], "model_type": "clip_vision_model"}
        return {
            **config, "vision_config": vision, "image_token_index": ids["image_token_index"], "vision_feature_layer": -1
        }, processor  # fmt: skip
    from transformers import LlavaOnevisionProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

    pinpoints = [[16, 32], [32, 16], [32, 32]]
    images = LlavaOnevisionImageProcessorPil(size={"height": 16, "width": 16}, image_grid_pinpoints=pinpoints)
    processor = LlavaOnevisionProcessor(
        images, tokenizer, LlavaOnevisionVideoProcessor(), num_image_tokens=16, vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )  # fmt: skip
    vision = {**config["vision_config"], "model_type": "siglip_vision_model", "vision_use_head": False}
    return {**config, **ids, "vision_config": vision, "image_grid_pinpoints": pinpoints}, processor


IMAGE_ARCHITECTURES: dict[str, Callable[[str, int], tuple[dict[str, Any], ProcessorMixin]]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "gemma3": _gemma3,
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "llava": _llava,
    "llava_onevision": _llava,
}
"""Model type to what makes its configuration and its processor."""


def make_image_model(name: str, *, width: int = 32, seed: int = 0) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Make a tiny model with random weights that react to every token, position and pixel, and its processor.

    Args:
        name: Key of ``IMAGE_ARCHITECTURES``, a model type.
        width: Of the model, in four heads.
        seed: Seed of the weights.
    """
    options, processor = IMAGE_ARCHITECTURES[name](name, width)
    tokenizer: Any = processor.tokenizer
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
    }
    options["text_config"] |= {"vocab_size": len(tokenizer), **ends}
    config = AutoConfig.for_model(name, **options)
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            else:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.float(), processor


SIZES = ((16, 16), (40, 24), (24, 56), (33, 17))


def noise(seed: int, size: tuple[int, int] = (16, 16)) -> Any:
    """An image whose pixels the seed decides."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


class Gallery:
    """Shows two images, then one or none before each of the next turns; the sum of the answers' letters is the reward."""

    turns = 3

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.random, self.turn = random.Random(seed), 0
        words = "more " * self.random.randrange(4)
        return [self._message([f"look {words}", self._image(), "and", self._image()])], {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        shown = [self._image() for _ in range(self.random.randrange(2))] if self.turn > 1 else [self._image()]
        reward = sum(map(ord, action)) % 5 / 4
        return [self._message([*shown, "again"])], reward, self.turn >= self.turns, False, {}

    def _image(self) -> Any:
        return noise(self.random.randrange(10**6), self.random.choice(SIZES))

    @staticmethod
    def _message(parts: list[Any]) -> dict[str, Any]:
        written = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ]
        return {"role": "user", "content": written}
