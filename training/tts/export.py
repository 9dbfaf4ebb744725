"""Writes the checkpoint folder that the server loads: a Talker of CustomVoice with its codec, in the published layout.

    python -m training.tts.export --talker talker.pt --wave wave.pt --tokenizer tokenizer.json --out DIR/tts_custom_voice

Weights are float16. The codec's wave encoder is not trained: its tensors are zero, so that the file is complete; speaking
with the built-in voices never runs it, and a Base checkpoint (voices from recordings) cannot be made from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from aura_omni.models.codec import DECODER_LAYOUT, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT
from aura_omni.models.qwen3_tts import TALKER_LAYOUT
from aura_omni.models.weights import to_published
from aura_omni.nano import published
from aura_omni.nano.published import Json
from training.tts import clock, shape
from training.tts.codec_model import MelCodec
from training.tts.talker_model import TrainedTalker


@torch.no_grad()
def decoder_of(model: MelCodec) -> CodecDecoder:
    """The product's decoder with the books of the training model as its own."""
    decoder = model.decoder
    first, rest = decoder.quantizer.rvq_first, decoder.quantizer.rvq_rest
    first.output_proj.weight.copy_(model.first.weight[..., None])
    rest.output_proj.weight.copy_(model.rest.weight[..., None])
    tables = [model.table0(), *model.books.table]
    books = [layer["_codebook"] for part in (first, rest) for layer in part.vq["layers"]]
    for number, book in enumerate(books):
        book.cluster_usage.fill_(1.0)
        book.embedding_sum.zero_()
        if number < len(tables):
            book.embedding_sum[: len(tables[number])].copy_(tables[number])
    return decoder


def untrained_encoder() -> dict[str, Tensor]:
    """Zero everywhere but in the counts that books are divided by; with the tensors that no network reads."""
    _, encoder = shape.codec()
    tensors = {name: torch.zeros_like(value) for name, value in to_published(encoder, ENCODER_LAYOUT).items()}
    tensors |= {name: torch.zeros(size) for name, size in published.speech_tokenizer_unused(shape.SIZES).items()}
    for name, value in tensors.items():
        if name.endswith(("cluster_usage", "initialized")):
            value.fill_(1)
    return tensors


def write(folder: Path, files: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    halves = {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}
    wrong = [name for name, value in halves.items() if not value.float().isfinite().all()]
    if wrong:
        raise ValueError(f"not finite in float16: {', '.join(wrong)}")
    save_file(halves, folder / "model.safetensors", {"format": "pt"})


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    config = published.tokenizer_config(
        {token.content: number for number, token in added.items()},
        [token.content for token in added.values() if token.special],
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def export(out: Path, tokenizer: Tokenizer, talker: TrainedTalker, codec: MelCodec) -> None:
    """talker is folded by this."""
    talker.fold()
    write_tokenizer(out, tokenizer)
    files = shape.talker_files(shape.ids_of(tokenizer), tokenizer.get_vocab_size())
    write(out, files, to_published(talker.talker, TALKER_LAYOUT))
    decoder = to_published(decoder_of(codec), DECODER_LAYOUT)
    codec_tensors = untrained_encoder() | decoder
    write(out / "speech_tokenizer", shape.codec_files(), codec_tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--talker", type=Path, required=True)
    parser.add_argument("--wave", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    talker, codec = TrainedTalker(tokenizer.get_vocab_size()), MelCodec()
    talker.load_state_dict(clock.load(given.talker)["model"])
    codec.load_state_dict(clock.load(given.wave)["model"])
    export(given.out, tokenizer, talker, codec)
    for file in sorted(given.out.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.relative_to(given.out)}")


if __name__ == "__main__":
    main()
