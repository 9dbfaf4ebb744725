"""Ask, transcribe and speak without a server: python examples/offline.py [DEPLOY_FILE]"""

import sys
from pathlib import Path

from aura_omni import Pipeline

samples = Path(__file__).parent / "online_serving/aura_omni"
with Pipeline.load(sys.argv[1] if sys.argv[1:] else "nano.yaml") as pipeline:
    answer = pipeline.chat(audio=samples / "shapes_question.wav", video=samples / "shapes_clip.mp4")
    print(answer.transcripts, answer.text)
    print(pipeline.transcribe(samples / "shapes_question.wav").text)
    answer.save("answer.wav")  # 24 kHz; by the suffix also mp3, opus, flac
    pipeline.say("Good morning.").save("morning.mp3")
    for samples_24k in pipeline.say_chunks("This is played while it is made."):
        print(len(samples_24k) / 24_000, "s")
