"""Speech to text through OpenAI's official Python client, unchanged, against a running server.

`scripts/serve-clients` starts the server and runs this with its address in SERVER.
"""

import os
import unittest
from pathlib import Path

import openai

SERVER = os.environ["SERVER"]
KEY = "a key"
SOUND = Path(__file__).parents[1] / "data/tiny-random-sound/chirp.wav"


class Audio(unittest.TestCase):
    def setUp(self):
        client = openai.OpenAI(base_url=f"{SERVER}/v1", api_key=KEY, max_retries=0)
        self.addCleanup(client.close)
        self.transcriptions, self.translations = client.audio.transcriptions, client.audio.translations
        self.asked = dict(model="whisper", file=SOUND)

    def test_transcriptions_in_all_formats(self):
        asked = dict(**self.asked, language="en", temperature=0)
        short = self.transcriptions.create(**asked)
        self.assertTrue(short.text)
        self.assertEqual((short.usage.type, short.usage.seconds), ("duration", 3))
        self.assertEqual(self.transcriptions.create(**asked, response_format="text").strip(), short.text)
        long = self.transcriptions.create(**asked, response_format="verbose_json", timestamp_granularities=["segment"])
        self.assertEqual((long.text, long.language, long.duration), (short.text, "english", 3.0))
        self.assertEqual("".join(segment.text for segment in long.segments).strip(), short.text)
        self.assertTrue(all(0 <= segment.start <= segment.end <= 3 for segment in long.segments))
        asked_words = dict(response_format="verbose_json", timestamp_granularities=["word"])
        timed = self.transcriptions.create(**asked, **asked_words)
        self.assertIsNone(timed.segments)
        self.assertEqual("".join(word.word for word in timed.words), "".join(timed.text.split()))
        self.assertTrue(all(0 <= word.start <= word.end <= 3 for word in timed.words))
        for form in ["srt", "vtt"]:
            subtitles = self.transcriptions.create(**asked, response_format=form)
            self.assertEqual(subtitles.count(" --> "), len(long.segments))
            self.assertEqual(subtitles.startswith("WEBVTT"), form == "vtt")

    def test_streams(self):
        whole = self.transcriptions.create(**self.asked, prompt="In the den").text
        *deltas, done = self.transcriptions.create(**self.asked, prompt="In the den", stream=True)
        self.assertEqual({event.type for event in deltas}, {"transcript.text.delta"})
        self.assertEqual((done.type, done.text), ("transcript.text.done", whole))
        self.assertEqual("".join(event.delta for event in deltas).strip(), whole)

    def test_translations(self):
        short = self.translations.create(**self.asked, prompt="In the den")
        long = self.translations.create(**self.asked, prompt="In the den", response_format="verbose_json")
        self.assertTrue(short.text)
        self.assertEqual((long.text, long.language), (short.text, "english"))
        self.assertEqual(self.translations.create(**self.asked, prompt="In the den", response_format="text").strip(), short.text)

    def test_files_of_all_formats(self):
        for name, seconds in [("stereo.flac", 1), ("mono.mp3", 1), ("mono.m4a", 1), ("mono.opus", 1), ("stereo.webm", 1)]:
            asked = dict(model="whisper", file=SOUND.parents[1] / "sounds" / name)
            self.assertEqual(self.transcriptions.create(**asked).usage.seconds, seconds)

    def test_errors_name_the_field(self):
        for change, param in [
            (dict(file=("a.mp3", b"ID3 and so on")), "file"),
            (dict(language="klingon"), "language"),
            (dict(timestamp_granularities=["word"], response_format="srt"), "timestamp_granularities[]"),
            (dict(model="story"), "model"),
        ]:
            with self.assertRaises(openai.BadRequestError) as refused:
                self.transcriptions.create(**{**self.asked, **change})
            self.assertEqual(refused.exception.param, param)


if __name__ == "__main__":
    unittest.main()
