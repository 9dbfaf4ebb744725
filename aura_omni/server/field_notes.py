"""What each field of a request means, for the document. Fields of the same name mean the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping

NOTES: Mapping[str, str] = {
    # who answers, and what comes back
    "messages": "the last one is the user's; earlier ones are what was said before",
    "model": "a name of GET /v1/models; the first of them when left out",
    "modalities": 'what comes back: ["text"] runs no stage that speaks; both when left out',
    "audio": "format of the speech (wav when left out) and voice; with it a stream speaks through delta.audio",
    "stream": "answer as it is made",
    "stream_options": "include_usage: a last chunk with the usage",
    "stream_format": "audio: bytes as they are made; sse: events",
    "response_format": "of speech: wav (when left out), pcm, flac, mp3, opus, aac; of a transcript: json (when left out), text, "
    "verbose_json, srt, vtt",
    # how it sounds
    "input": "the text to speak",
    "voice": "a name of GET /v1/audio/voices",
    "speaker": "another name for voice",
    "instructions": "how to speak, where the checkpoint follows instructions",
    "language": "a name or an ISO 639-1 code, with or without a region; found out when left out",
    "task_type": "Base, CustomVoice or VoiceDesign: must be what the checkpoint can do",
    "ref_audio": "a recording of the voice to speak with: a URL, a data URL or base64; for Base",
    "ref_text": "what is said in the recording; an uploaded voice without it gives only its sound, and a ref_audio without it "
    "needs x_vector_only_mode",
    "x_vector_only_mode": "use only the sound of the voice of ref_audio",
    "non_streaming_mode": "give the whole text to the stage that speaks before it begins",
    "max_new_tokens": "longest speech, in frames of 80 ms",
    "speed": "of the speech; 1 is as it was made",
    "sample_rate": "of the speech, in Hz",
    "initial_codec_chunk_frames": "frames of 80 ms in the first piece of a stream",
    "additional_information": "tts_* keys: the fields above by the names that upstream's clients send; aura_system_prompt",
    # how tokens are drawn
    "sampling_params_list": "an object of sampling fields for each stage, in order, over the deploy file's",
    "temperature": "0 takes the most likely token",
    "top_p": "from the most likely tokens that have this share together",
    "top_k": "from so many of the most likely tokens; 0 or -1: from all",
    "min_p": "from tokens at least this share as likely as the most likely one",
    "max_tokens": "longest answer, in tokens",
    "max_completion_tokens": "another name for max_tokens",
    "min_tokens": "until then the answer does not end; at most max_tokens",
    "normalize": "false: the text is spoken as it is written, with its markup, digits and signs",
    "seed": "the same request with the same seed is answered the same",
    "stop": "texts at which the answer ends, without them",
    "stop_token_ids": "tokens of the model's vocabulary at which the answer ends",
    "presence_penalty": "against tokens that have been written",
    "frequency_penalty": "against tokens, by how often they have been written",
    "repetition_penalty": "above 1 against tokens that have been written or read",
    "logit_bias": "from -100 to 100 by token id",
    "ignore_eos": "do not end where the model would",
    # transcripts
    "file": "a recording, or a video with sound: WAV, MP3, M4A, FLAC, Ogg, WebM, MP4 and others",
    "prompt": "words to expect",
    "timestamp_granularities": '"segment", with verbose_json; there are no times of words',
    # voices
    "audio_sample": "1 to 30 seconds of one voice, at most 10 MiB",
    "name": "of the voice, up to 64 letters, digits, spaces and . - _",
    "consent": "who agreed to the use of this voice and when, or the id of a recording of it",
    "speaker_description": "kept and listed",
    "type": "audio_sample",
}
IGNORED = "accepted, and changes nothing"
