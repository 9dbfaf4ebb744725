"""The chain as the public packages compute it, from checkpoint folders in the published layout; nothing of aura_omni is used.

    heard = Ears(folder / "asr").hear(samples, max_tokens=24)
    said = Mind(folder / "aura").answer([Line("user", heard.text, frames, times_s)], max_tokens=24)
    spoken = Mouth(folder / "tts_custom_voice").speak(said.text, frames=30, speaker="ryan")

All greedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import load_file
from transformers import (
    Qwen2Tokenizer,
    Qwen3ASRConfig,
    Qwen3ASRForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from tests.reference_package import import_qwen_tts

# What the converted Qwen3-ASR repositories did to the names of the original ones.
ASR_RENAMES = {
    "thinker.audio_tower.proj1.": "model.multi_modal_projector.linear_1.",
    "thinker.audio_tower.proj2.": "model.multi_modal_projector.linear_2.",
    "thinker.audio_tower.": "model.audio_tower.",
    "thinker.model.": "model.language_model.",
    "thinker.lm_head.": "lm_head.",
}
LIVE_SYSTEM_PROMPT = (
    "You are receiving a live video stream where the final frame is the present moment. Respond only when a response is "
    "needed based on the user's message or the visual context. Otherwise, output '<|silent|>' to signify silence."
)


@dataclass(frozen=True)
class Line:
    """One message. frames uint8 [n, h, w, 3], n even, shown at times_s."""

    role: str
    text: str
    frames: np.ndarray | None = None
    times_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Said:
    """ids: generated, the one that ended them included; logits float32 [len(ids), V], of which each is the largest."""

    prompt: list[int]
    ids: list[int]
    logits: torch.Tensor
    text: str


@dataclass(frozen=True)
class Spoken:
    """frames int64 [n, 16]; samples float32 [n * 1920]."""

    frames: np.ndarray
    samples: np.ndarray


class Ears:
    """Qwen3-ASR as transformers has it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder)
        self._ends = read(folder / "generation_config.json")["eos_token_id"]
        self.model = Qwen3ASRForConditionalGeneration(asr_config(read(folder / "config.json"))).eval()
        state = {_renamed(name): value for name, value in load_file(folder / "model.safetensors").items()}
        state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
        self.model.load_state_dict(state, strict=True)

    @torch.inference_mode()
    def hear(self, samples: np.ndarray, *, max_tokens: int) -> Said:
        """samples float32 [n] at 16 kHz."""
        made = Qwen3ASRFeatureExtractor()(samples, sampling_rate=16_000, padding="longest", return_attention_mask=True)
        sound = {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}
        rows = len(self.model.get_audio_features(**sound, return_dict=True).pooler_output)
        prompt = (
            "<|im_start|>system\n<|im_end|>\n"
            f"<|im_start|>user\n<|audio_start|>{'<|audio_pad|>' * rows}<|audio_end|><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        inputs = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        ids, logits = generated(self.model, inputs, self._ends, max_tokens, **sound)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        text = text.partition("<asr_text>")[2 if "<asr_text>" in text else 0].strip()
        return Said(inputs[0].tolist(), ids, logits, text)


class Mind:
    """AURA as transformers has its architecture, its prompt as transformers 4.57 writes it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder)
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
        self._rules = read(folder / "video_preprocessor_config.json")
        ends = read(folder / "generation_config.json")["eos_token_id"]
        self._ends = [*ends, self.tokenizer.convert_tokens_to_ids("<|silent|>")]

    @torch.inference_mode()
    def answer(self, lines: Sequence[Line], *, max_tokens: int, bias: Mapping[int, float] | None = None) -> Said:
        prompt, patches, grids = f"<|im_start|>system\n{LIVE_SYSTEM_PROMPT}<|im_end|>\n", [], []
        for line in lines:
            prompt += f"<|im_start|>{line.role}\n"
            if line.frames is not None:
                values, (pairs, tall, wide) = self._patches(line.frames)
                patches.append(values)
                grids.append([pairs, tall, wide])
                pads = "<|vision_start|>" + "<|video_pad|>" * (tall * wide // 4) + "<|vision_end|>"
                for first_s, second_s in zip(line.times_s[::2], line.times_s[1::2], strict=True):
                    prompt += f"<{(first_s + second_s) / 2:.1f} seconds>{pads}"
            prompt += f"{line.text}<|im_end|>\n"
        inputs = torch.tensor([self.tokenizer(prompt + "<|im_start|>assistant\n")["input_ids"]])
        biased: dict[str, Any] = {"sequence_bias": {(token,): weight for token, weight in bias.items()}} if bias else {}
        ids, logits = generated(
            self.model,
            inputs,
            self._ends,
            max_tokens,
            pixel_values_videos=torch.cat(patches),
            video_grid_thw=torch.tensor(grids),
            mm_token_type_ids=2 * (inputs == self.model.config.video_token_id).int(),
            **biased,
        )
        text = self.tokenizer.decode([token for token in ids if token not in self._ends])
        return Said(inputs[0].tolist(), ids, logits, text)

    def _patches(self, frames: np.ndarray) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Values [patches, 1536], the four patches of a token one after another, and (pairs, rows, columns) of patches."""
        count, height, width, _ = frames.shape
        least, most = self._rules["size"]["shortest_edge"], self._rules["size"]["longest_edge"]
        tall, wide = smart_resize(count, height, width, 2, 32, min_pixels=least, max_pixels=most)
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        pixels = F.interpolate(pixels, (tall, wide), mode="bicubic", antialias=True, align_corners=False)
        values = (pixels.float() - 127.5) / 127.5
        order = "(t two) c (h a p) (w b q) -> (t h w a b) (c two p q)"
        return rearrange(values, order, two=2, a=2, b=2, p=16, q=16), (count // 2, tall // 16, wide // 16)


class Mouth:
    """Qwen3-TTS as its own package has it, sound included."""

    def __init__(self, folder: Path) -> None:
        self.package = import_qwen_tts().Qwen3TTSModel.from_pretrained(str(folder))
        self.model = self.package.model

    def speak(self, text: str, *, frames: int, **voice: Any) -> Spoken:
        """At most so many frames; voice: arguments of the package's generate_custom_voice, _voice_clone or _voice_design."""
        say = {
            "custom_voice": self.package.generate_custom_voice,
            "base": self.package.generate_voice_clone,
            "voice_design": self.package.generate_voice_design,
        }[self.model.tts_model_type]
        return self._spoken(frames, lambda greedy: say(text=text, **voice, **greedy)[0][0])

    def speak_ids(self, ids: Sequence[int], *, frames: int, language: str, speaker: str) -> Spoken:
        """Text that is ids already, inside the package's template."""
        before, after = (
            self.package._tokenize_texts([template])[0]
            for template in ("<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n")
        )
        prompt = torch.cat([before, torch.tensor([list(ids)]), after], dim=1)

        def say(greedy: dict[str, Any]) -> np.ndarray:
            settings = self.package._merge_generate_kwargs(**greedy)
            codes, _ = self.model.generate(
                input_ids=[prompt], languages=[language], speakers=[speaker], non_streaming_mode=True, **settings
            )
            return self.model.speech_tokenizer.decode([{"audio_codes": codes[0]}])[0][0]

        return self._spoken(frames, say)

    def _spoken(self, frames: int, say: Callable[[dict[str, Any]], np.ndarray]) -> Spoken:
        made: list[torch.Tensor] = []
        generate = self.model.generate

        def watched(**arguments: Any) -> Any:
            result = generate(**arguments)
            made.extend(result[0])
            return result

        self.model.generate = watched
        try:
            # The code predictor runs at the start of the next step, so the last token never becomes a frame.
            samples = say({"do_sample": False, "subtalker_dosample": False, "max_new_tokens": frames + 1})
        finally:
            del self.model.generate
        (codes,) = made
        return Spoken(codes.numpy(), samples[-1920 * len(codes) :])


def asr_config(original: Mapping[str, Any]) -> Qwen3ASRConfig:
    """The original config.json, nested and with rope_scaling, as transformers wants it."""
    thinker = original["thinker_config"]
    audio = {
        key: value for key, value in thinker["audio_config"].items() if key not in ("model_type", "conv_chunksize")
    }
    del audio["max_source_positions"]
    text = {key: value for key, value in thinker["text_config"].items() if key not in ("rope_theta", "rope_scaling")}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": thinker["text_config"]["rope_theta"]}
    return Qwen3ASRConfig(
        audio_config={**audio, "model_type": "qwen3_asr_encoder", "max_position_embeddings": 13},
        text_config=text,
        audio_token_id=thinker["audio_token_id"],
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def generated(
    model: Any, inputs: torch.Tensor, ends: list[int], max_tokens: int, **more: Any
) -> tuple[list[int], torch.Tensor]:
    """Greedy ids and their logits before any bias."""
    out = model.generate(
        input_ids=inputs,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=ends,
        pad_token_id=ends[0],
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )
    return out.sequences[0, inputs.shape[1] :].tolist(), torch.cat(out.logits)


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _renamed(name: str) -> str:
    for original, converted in ASR_RENAMES.items():
        if name.startswith(original):
            return converted + name.removeprefix(original)
    raise KeyError(name)
